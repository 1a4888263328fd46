"""Explains the errors of jax, while it traces and lowers: the size, layer and line behind each."""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pax_export._foundations.errors import (
    PaxError,
    StateChangeError,
    SymbolicDimensionError,
    TracedValueError,
    UnsupportedOperationError,
    first_line,
    hide_frames,
)
from pax_export._foundations.jax import equations_of
from pax_export._foundations.jaxpr import inner_programs
from pax_export._foundations.types import Equation
from pax_export.core import Module, named_modules
from pax_export.export import symbolic_numpy
from pax_export.export.artifact import dimensions
from pax_export.export.portable import NotDecomposedError
from pax_export.export.tracing.inputs import Inputs
from pax_export.export.tracing.source_lines import attach_operations, is_users

#: How to put a net of other libraries into eval mode.
EVAL_MODE = (
    "the net in eval mode, if it is in train mode: model.eval(), "
    "equinox.nn.inference_mode(model), is_training=False of haiku; "
)

#: jax's errors when Python code needs the value of a tracer.
OF_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_PACKAGE = Path(__file__).parents[2]
#: Where the names of files begin that are neither a model's nor a layer's.
_NOBODYS = (str(_PACKAGE / "export"), str(_PACKAGE / "_foundations"), contextlib.__file__, "<")


@contextlib.contextmanager
def symbolic_errors(inputs: Inputs) -> Iterator[None]:
    """Says which inputs, sizes and lines an error of the model is about."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of the model; raised again if sizes are not the cause
        hide_frames(error)
        if type(error).__name__ == "TraceContextError":  # of flax.nnx
            raise _changed_from_inside(error) from error
        if inputs.dimensions and _OF_SIZES.search(f"{type(error).__name__}: {error}"):
            raise _of_sizes(error, inputs.dimensions) from error
        if isinstance(error, OF_VALUES):
            raise TracedValueError(
                f"The model looks at the value of an array: {first_line(error)}.",
                where=_line_and_layer(error),
                write="jax.numpy.where or jax.lax.cond for `if`, jax.lax.while_loop for `while`, "
                "jax.numpy for numpy",
            ) from error
        shapes = (f"{e.name}: {e.struct.dtype}{list(e.struct.shape)}" for e in inputs.flat)
        error.add_note(f"The model was traced with the inputs {', '.join(shapes)}.")
        raise


#: jax's words for sizes, and the expressions that only symbolic sizes have.
_OF_SIZES = re.compile(
    r"Inconclusive|symbolic dimension|polymorphism|_DimExpr|non-constant size|"
    r"\b(?:min|max|floordiv|mod)\([^()]*[A-Za-z]",
    re.IGNORECASE,
)
_COMPARED = re.compile(r"comparison '(.+?)' ([<>]=?) '(.+?)' is inconclusive")
_EXTREME = re.compile(r"\b(?:min|max)\(([^(),]+)(,) ([^(),]+)\)")
_DIVIDED = re.compile(r"\b(?:floordiv|mod)\(([^(),]*), (?:- )?(\d+)\)")
#: What to write for a size where jax takes a number, by its words.
_INSTEAD = {
    "interpreted as an integer": "x.shape[0] for len(x)",
    "valid indices": "jax.numpy.asarray(size) as the index",
}


def _of_sizes(error: Exception, names: Sequence[str]) -> SymbolicDimensionError:
    text = str(error)
    found = [*_constraints(text), *_multiples(text, names)]
    about = [
        [name for name in names if re.search(rf"\b{name}\b", t)] for t in ("".join(found), text)
    ]
    named = about[0] or about[1] or list(names)
    explained = SymbolicDimensionError(
        f"The size of the dimension {', '.join(named)} must be known here: {first_line(error)}",
        where=_line_and_layer(error),
        got=f"the symbolic dimension {', '.join(named)}",
        write="; or ".join(
            [
                *(advice for words, advice in _INSTEAD.items() if words in text),
                *_counterparts(error),
                *found,
                f"a number instead of {' or '.join(map(repr, named))} in its spec",
                "operations that support every size",
            ]
        ),
    )
    for note in getattr(error, "__notes__", ()):
        if not note.startswith("-----"):  # jax's own, of frames that it hides
            explained.add_note(note)
    return explained


_DERIVATIVES = {"grad", "hessian", "jacfwd", "jacrev", "jvp", "value_and_grad", "vjp"}


def _counterparts(error: Exception) -> list[str]:
    """The function of `symbolic_numpy` for the one that was called, or that differentiates it."""
    known = set(symbolic_numpy.__all__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_of_model(frame.filename) and frame.lineno and frame.colno is not None:
            line = linecache.getline(frame.filename, frame.lineno)[frame.colno :]
            called = re.match(r"(?:\w+\.)*(\w+)\(", line)
            if called and called[1] in known:
                return [f"symbolic_numpy.{called[1]} of pax_export.export"]
            known &= _DERIVATIVES
    return []


def _constraints(text: str) -> list[str]:
    """The two constraints, each of which decides the first comparison in an error of jax."""
    for size, order, bound in [*_COMPARED.findall(text), *_EXTREME.findall(text)][:1]:
        if not re.search("[A-Za-z]", size):
            size, bound = bound, size
        least, most = {">": (1, 0), "<=": (1, 0), ",": (0, 0)}.get(order, (0, -1))
        sides = f"{size} >= {_plus(bound, least)}", f"{size} <= {_plus(bound, most)}"
        return [f"constraints=({side!r},)" for side in sides]
    return []


def _plus(bound: str, number: int) -> str:
    if not number:
        return bound
    sign = "+" if number > 0 else "-"
    return str(int(bound) + number) if bound.isdecimal() else f"{bound} {sign} {abs(number)}"


def _multiples(text: str, names: Sequence[str]) -> list[str]:
    """A multiple of the dimension that jax divides, as a spec has it."""
    for size, factor in _DIVIDED.findall(text)[:1]:
        return [
            f"'{factor}*{name}' in its spec" for name in names if re.search(rf"\b{name}\b", size)
        ][:1]
    return []


def _changed_from_inside(error: Exception) -> StateChangeError:
    """The advice for a net of flax.nnx that changes and that a function closes over."""
    return StateChangeError(
        "A call changes the state of a net that the function closes over, and the export "
        "would not.",
        where=_line_and_layer(error),
        got=first_line(error),
        write=f"{EVAL_MODE}the params as the first argument of the function: "
        "`graph, params = nnx.split(net)`, then `nnx.merge(graph, params)(x)` in the function",
    )


def leaves_read(error: Exception, count: int) -> set[int]:
    """Returns the leaves, the first operands, whose values Python reads; empty with other operands.

    jax names the operands that a value depends on, ``operands[3]``, in the text alone.
    """
    found = {int(index) for index in re.findall(r"\boperands\[(\d+)\]", str(error))}
    return found if all(index < count for index in found) else set()


def _line_and_layer(error: Exception) -> str:
    """The innermost line that is not jax's or ours, and the layer that it belongs to."""
    line = _line_of(error) or "unknown"
    layer = _layer_of(_selves(error))
    return f"{layer} ({line})" if layer else line


def _layer_of(owners: Iterable[Any]) -> str:
    """Returns the name of the layer that ran last, ``encoder.norm: LayerNorm``."""
    modules = [owner for owner in owners if isinstance(owner, Module)]
    if not modules:
        return ""
    root, layer = modules[0], modules[-1]
    name = next((name for name, module in named_modules(root) if module is layer), "")
    return f"{name}: {type(layer).__name__}" if name else type(layer).__name__


def _selves(error: Exception) -> list[Any]:
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def line_of_model(error: Exception) -> str:
    """The line of the model behind an error of jax, from the traceback in its cause; or ""."""
    cause = error.__cause__
    return (_line_of(cause) if cause is not None else "") or _line_of(error)


def _line_of(error: BaseException) -> str:
    """Returns the innermost line of a model, after the user's line if it is of a library."""
    innermost = user = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if _is_of_model(file):
            innermost = f"{Path(file).name}:{line}"
            user = innermost if is_users(file) else user
    return ", in ".join(dict.fromkeys(filter(None, (user, innermost))))


def _is_of_model(file: str) -> bool:
    return "jax" not in Path(file).parts and not file.startswith(_NOBODYS)


@contextlib.contextmanager
def named_refusals() -> Iterator[None]:
    """Context manager that converts lowering errors to ours, with the operation and its line.

    Raises:
        SymbolicDimensionError: it has a symbolic size that jax must know.
        UnsupportedOperationError: jax cannot lower it.
    """
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of jax or of a rule; raised again if it names no operation
        equations = equations_of(error)
        if not equations and "Cannot solve for values of dimension" in str(error):
            found = re.search(r"Unprocessed specifications: '(.*?)'", str(error))
            raise SymbolicDimensionError(
                "jax cannot compute a symbolic dimension from the sizes of the inputs.",
                got=found[1] if found else first_line(error),
                write="a size of one dimension alone, e.g. 'n' or '2*n'",
            ) from error
        if not equations:
            raise
        raise _refusal(equations, error) from error


def _refusal(equations: list[Any], error: Exception) -> PaxError:
    calls = [next(inner_programs(each), None) is not None for each in equations]
    index = calls.index(False) if False in calls else len(calls) - 1
    chain = equations[: index + 1]
    name = equations[index].primitive.name
    symbolic = _symbolic_dimensions(equations[index])
    if not _speaks_of(symbolic, error):
        reason, write = _reason(error), "the same in other operations of jax.numpy and jax.lax"
        refusal = UnsupportedOperationError(
            f"jax cannot export the operation {name}: {reason}.",
            write=f"{write}{_of_platforms(str(error))}",
        )
        return attach_operations(refusal, [chain])
    names = ", ".join(symbolic)
    refusal = SymbolicDimensionError(
        f"The operation {name} needs sizes that are known: {_reason(error)}.",
        got=f"the symbolic dimension {names}",
        write=f"a number instead of {symbolic[0]!r} in its spec; or operations that work for "
        "every size",
    )
    return attach_operations(refusal, [chain])


def _of_platforms(text: str) -> str:
    """Returns the platforms to write where an operation lacks some of those of the export."""
    if found := re.search(r"exported for platforms '\((.+?),?\)'", text):  # of a function called
        return f"; or platforms=[{found[1]}]"
    if found := re.search(r"not found for platforms? \[?(.+?)\]?(\.|$)", text, re.MULTILINE):
        return f"; or platforms= without {found[1]}"
    return ""


#: jax's messages about sizes that it does not support.
_MAY_MEAN_SIZES = re.compile(
    "polymorphi|symbolic|static|constant|dynamic|inconclusive|_DimExpr", re.IGNORECASE
)


def _speaks_of(symbolic: list[str], error: Exception) -> bool:
    """Whether it is the symbolic dimensions that an error is about."""
    text = f"{type(error).__name__} {error}"
    names = (re.search(rf"\b{re.escape(name)}\b", text) for name in symbolic)
    return bool(symbolic) and (bool(_MAY_MEAN_SIZES.search(text)) or any(names))


def _symbolic_dimensions(equation: Equation) -> list[str]:
    """Returns the symbolic dimensions of operands, results and parameters of an operation."""
    atoms = (*equation.invars, *equation.outvars)
    sizes = [size for atom in atoms for size in getattr(atom.aval, "shape", ())]
    for value in equation.params.values():
        sizes += value if isinstance(value, tuple) else [value]
    texts = (str(size) for size in sizes if hasattr(size, "scope"))
    return list(dict.fromkeys(name for text in texts for name in dimensions.names(text)))


def _reason(error: Exception) -> str:
    if isinstance(error, NotDecomposedError):
        return f"there is no decomposition {error}"
    return first_line(error)
