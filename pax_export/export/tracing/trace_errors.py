"""Explains the errors of a trace: the symbolic size, the layer and the line behind each."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pax_export._errors import (
    PaxError,
    StateChangeError,
    SymbolicDimensionError,
    TracedValueError,
    first_line,
)
from pax_export._tracebacks import hide_frames
from pax_export.export import symbolic_numpy
from pax_export.export.artifact import dimensions
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import layer_of
from pax_export.export.tracing.owners import owner_name
from pax_export.export.tracing.spec import Inputs
from pax_export.export.tracing.traced import for_symbolic_sizes

#: How to put a net of other libraries into eval mode.
EVAL_MODE = (
    "the net in eval mode, if it is in train mode: model.eval(), "
    "equinox.nn.inference_mode(model), is_training=False of haiku; "
)

#: jax's errors when Python code needs the value of a tracer.
_OF_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_PACKAGE = Path(__file__).parents[2]
#: Where the names of files begin that are neither a model's nor a layer's.
_NOBODYS = (str(_PACKAGE / "export"), str(_PACKAGE / "_jax"), contextlib.__file__, "<")


@contextlib.contextmanager
def symbolic_errors(
    function: Callable, structs: Sequence[jax.ShapeDtypeStruct], inputs: Inputs
) -> Iterator[None]:
    """Explains an error that does not occur with numbers in place of symbolic dimensions."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:
        hide_frames(error)
        if type(error).__name__ == "TraceContextError":  # of flax.nnx
            raise _changed_from_inside(error) from error
        guilty = [
            name for name in inputs.dimensions if _is_failing(function, structs, inputs, {name})
        ]
        if not guilty and inputs.dimensions and not _is_failing(function, structs, inputs, set()):
            guilty = list(inputs.dimensions)
        if not guilty and type(error).__name__ == "InconclusiveDimensionOperation":
            named = [name for name in inputs.dimensions if re.search(rf"\b{name}\b", str(error))]
            guilty = named or list(inputs.dimensions)  # whatever the numbers above fail for
        if not guilty and isinstance(error, _OF_VALUES):
            raise TracedValueError(
                "The model looks at the value of an array, as a Python `if`, `while`, float() or "
                f"numpy do, and an export is made without values: {first_line(error)}.",
                where=_place_of(error),
                write="jax.numpy.where or jax.lax.cond for `if`, jax.lax.while_loop for `while`, "
                "jax.numpy for numpy",
            ) from error
        if not guilty:
            shapes = (f"{e.name}: {e.struct.dtype}{list(e.struct.shape)}" for e in inputs.flat)
            error.add_note(f"The model was traced with the inputs {', '.join(shapes)}.")
            raise
        names = ", ".join(guilty)
        explained = SymbolicDimensionError(
            f"The size of the dimension {names} must be known here: {first_line(error)}",
            where=_place_of(error),
            got=f"the symbolic dimension {names}",
            write=f"{_as_symbolic(error)}{_as_constraints(error, guilty[0])}a number instead of "
            f"{guilty[0]!r} in its spec; or operations that support every size",
        )
        for note in getattr(error, "__notes__", ()):
            if not note.startswith("-----"):  # jax's own, of frames that it hides
                explained.add_note(note)
        raise explained from error


#: Functions that have no derivative along a symbolic size, but have one in `symbolic_numpy`.
_DERIVED_THERE = re.compile("prod|cum|solve|fft|conv|max|min")
_DERIVATIVES = {"grad", "hessian", "jacfwd", "jacrev", "jvp", "value_and_grad", "vjp"}


def _as_symbolic(error: Exception) -> str:
    """Returns what to write for a function or index of jax that accepts no symbolic size."""
    if "valid indices" in str(error):
        return "jax.numpy.asarray(size) as the index; or "
    called = list(_called_functions(error))
    if not called:
        return ""
    name = called[0]
    if name == "len" and "interpreted as an integer" in str(error):
        return "x.shape[0] for len(x); or "
    if name not in symbolic_numpy.__all__ and _DERIVED_THERE.search(name):
        name = next((outer for outer in called if outer in _DERIVATIVES), "")
    found = name in symbolic_numpy.__all__
    return f"symbolic_numpy.{name} of pax_export.export; or " if found else ""


_ORDERED = re.compile(r"comparison '(.+?)' ([<>]=?) '(-?\d+)' is inconclusive")
_EXTREME = re.compile(r"\b(min|max)\((-?\d+), ")
_DIVIDED = re.compile(r"\b(?:floordiv|mod)\(.*?, (\d+)\)")


def _as_constraints(error: Exception, name: str) -> str:
    """Returns the constraints that decide the sizes in an error, or examples of constraints."""
    text = str(error)
    found = {
        f"{_balanced(text[each.end() :])} {'<=' if each[1] == 'min' else '>='} {each[2]}"
        for each in _EXTREME.finditer(text)
    }
    for size, order, bound in _ORDERED.findall(text):
        closed = int(bound) + {"<": -1, ">": 1}.get(order, 0)
        found.add(f"{size} {order[0]}= {closed}")
    if not found:
        factor = math.lcm(*map(int, _DIVIDED.findall(text)))
        if factor > 1:
            return f"{f'{factor}*{name}'!r} in its spec; or "
        return "constraints on it, such as \"2*n\" or constraints=('n >= 2',); or "
    return f"constraints=({' '.join(f'{each!r},' for each in sorted(found))}); or "


def _balanced(text: str) -> str:
    """Returns a text up to the bracket that closes one before it."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[:index]
    return text


def _called_functions(error: Exception) -> Iterator[str]:
    """The functions of jax, or `len`, that the model was calling, from the innermost call."""
    entries, traced = [], error.__traceback__
    while traced is not None:
        entries.append((traced.tb_frame, traced.tb_lasti))
        traced = traced.tb_next
    for frame, instruction in reversed(entries):
        code = frame.f_code
        if not _is_of_model(code.co_filename):
            continue
        positions = itertools.islice(code.co_positions(), max(instruction, 0) // 2, None)
        line, _, column, _ = next(positions, (None,) * 4)
        text = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :].decode()
        first, *rest = re.split(r"\.", re.match(r"[\w.]*", text)[0])  # type: ignore[index]
        value = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}.get(first)
        for part in rest:
            value = getattr(value, part, None)
        if value is len or str(getattr(value, "__module__", "")).startswith("jax"):
            yield getattr(value, "__name__", "")


def _changed_from_inside(error: Exception) -> StateChangeError:
    """The advice for a net of flax.nnx that changes and that a function closes over."""
    return StateChangeError(
        "A call changes the state of a net that the function closes over, and the export "
        "would not.",
        where=owner_name(_selves(error)) or None,
        got=first_line(error),
        write=f"{EVAL_MODE}the params as the first argument of the function: "
        "`graph, params = nnx.split(net)`, then `nnx.merge(graph, params)(x)` in the function",
    )


def _is_failing(function: Callable, structs: Sequence[Any], inputs: Inputs, symbolic: set) -> bool:
    """Whether the trace fails where only these dimensions are symbolic."""
    if symbolic and _is_failing(function, structs, inputs, set()):
        return False  # it fails for numbers, too: another mistake
    numbers = {
        name: 4 + 2 * index for index, name in enumerate(inputs.dimensions) if name not in symbolic
    }
    try:
        given = [_with_numbers(struct, numbers) for struct in structs]
        with for_symbolic_sizes(given):
            jax.eval_shape(function, given)
    except Exception:
        return True
    return False


def _with_numbers(struct: jax.ShapeDtypeStruct, numbers: dict[str, int]) -> jax.ShapeDtypeStruct:
    struct = dtypes.stored(struct)
    shape = [
        dimensions.value(size, numbers) if set(dimensions.names(size)) <= set(numbers) else old
        for old in struct.shape
        for size in [old if isinstance(old, int) else str(old)]
    ]
    return jax.ShapeDtypeStruct(tuple(shape), struct.dtype)


def _place_of(error: Exception) -> str:
    """The innermost line that is not jax's or ours, and the layer that it belongs to."""
    place = _line_of(error) or "unknown"
    layer = layer_of(_selves(error))
    return f"{layer} ({place})" if layer else place


def _selves(error: Exception) -> list[Any]:
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def line_of_model(error: Exception) -> str:
    """The line of the model behind an error of jax, from the traceback in its cause; or ""."""
    cause = error.__cause__
    return (_line_of(cause) if cause is not None else "") or _line_of(error)


def _line_of(error: BaseException) -> str:
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_of_model(frame.f_code.co_filename):
            place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return place


def _is_of_model(file: str) -> bool:
    return "jax" not in Path(file).parts and not file.startswith(_NOBODYS)
