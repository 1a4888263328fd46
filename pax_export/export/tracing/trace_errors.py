"""Explains the errors of a trace: the symbolic size, the layer and the line behind each."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pax_export._foundations.errors import (
    PaxError,
    StateChangeError,
    SymbolicDimensionError,
    TracedValueError,
    first_line,
)
from pax_export._foundations.tracebacks import hide_frames
from pax_export.export import symbolic_numpy
from pax_export.export.artifact import dimensions
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import layer_of
from pax_export.export.tracing.inputs import Inputs
from pax_export.export.tracing.source_lines import is_users
from pax_export.export.tracing.traced import is_of_size, trace_with_sizes

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
def symbolic_errors(
    function: Callable, structs: Sequence[jax.ShapeDtypeStruct], inputs: Inputs
) -> Iterator[None]:
    """Explains an error that does not occur with numbers in place of symbolic dimensions."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of the model; raised again if sizes are not the cause
        hide_frames(error)
        if type(error).__name__ == "TraceContextError":  # of flax.nnx
            raise _changed_from_inside(error) from error
        retrace = partial(_error_with, function, structs, inputs)
        if inputs.dimensions and _is_of_sizes(error, inputs, retrace):
            raise _of_sizes(error, inputs, retrace) from error
        if isinstance(error, OF_VALUES):
            raise TracedValueError(
                "The model looks at the value of an array, as a Python `if`, `while`, float() or "
                f"numpy do, and an export is made without values: {first_line(error)}.",
                where=_place_of(error),
                write="jax.numpy.where or jax.lax.cond for `if`, jax.lax.while_loop for `while`, "
                "jax.numpy for numpy",
            ) from error
        shapes = (f"{e.name}: {e.struct.dtype}{list(e.struct.shape)}" for e in inputs.flat)
        error.add_note(f"The model was traced with the inputs {', '.join(shapes)}.")
        raise


#: Returns the error of a trace with these constraints and sizes, None if there is none.
Retrace = Callable[..., Exception | None]


def _error_with(
    function: Callable,
    structs: Sequence[jax.ShapeDtypeStruct],
    inputs: Inputs,
    constraints: Sequence[str] = (),
    sizes: Mapping[str, object] | None = None,
) -> Exception | None:
    try:
        scope = jax.export.SymbolicScope((*inputs.constraints, *constraints))
        given = [_resized(dtypes.stored(each), scope, sizes or {}) for each in structs]
        trace_with_sizes(lambda: jax.eval_shape(function, given), given)
    except Exception as error:  # of jax, or of the model
        return error
    return None


def _resized(
    struct: jax.ShapeDtypeStruct, scope: jax.export.SymbolicScope, sizes: Mapping[str, object]
) -> jax.ShapeDtypeStruct:
    """Returns a struct with its symbolic sizes in another scope, some of them replaced."""
    texts = [
        re.sub(r"[a-zA-Z_]\w*", lambda name: f"{sizes.get(name[0], name[0])}", str(size))
        for size in struct.shape
    ]
    shape = jax.export.symbolic_shape(", ".join(texts), scope=scope)
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _is_of_sizes(error: Exception, inputs: Inputs, retrace: Retrace) -> bool:
    return type(error).__name__ == "InconclusiveDimensionOperation" or any(
        retrace(sizes=numbers) is None for numbers in _some_numbers(inputs)
    )


def _some_numbers(inputs: Inputs) -> Iterator[dict[str, int]]:
    """Numbers for the dimensions that constraints allow: small ones, and multiples of many."""
    for first, step in ((4, 2), (840, 840)):
        numbers = {name: first + step * at for at, name in enumerate(inputs.dimensions)}
        if all(dimensions.holds(text, numbers) for text in inputs.constraints):
            yield numbers
    if inputs.constraints:
        shapes = [dtypes.shape_of(each.struct) for each in inputs.flat]
        yield from dimensions.choose(shapes, inputs.constraints)


def _of_sizes(error: Exception, inputs: Inputs, retrace: Retrace) -> SymbolicDimensionError:
    named = _words(str(error), inputs) or list(inputs.dimensions)
    proposed, error = _proposal(error, named, retrace)
    guilty = _words(proposed, inputs) or named
    names = ", ".join(guilty)
    explained = SymbolicDimensionError(
        f"The size of the dimension {names} must be known here: {first_line(error)}",
        where=_place_of(error),
        got=f"the symbolic dimension {names}",
        write=f"{_as_symbolic(error)}{proposed}a number instead of "
        f"{' or '.join(map(repr, guilty))} in its spec; or operations that support every size",
    )
    for note in getattr(error, "__notes__", ()):
        if not note.startswith("-----"):  # jax's own, of frames that it hides
            explained.add_note(note)
    return explained


def _words(text: str, inputs: Inputs) -> list[str]:
    return [name for name in inputs.dimensions if re.search(rf"\b{name}\b", text)]


#: Functions that have no derivative along a symbolic size, but have one in `symbolic_numpy`.
_DERIVED_THERE = re.compile("prod|cum|solve|fft|conv|max|min")
_DERIVATIVES = {"grad", "hessian", "jacfwd", "jacrev", "jvp", "value_and_grad", "vjp"}


def _as_symbolic(error: Exception) -> str:
    """Returns what to write for a function or index of jax that accepts no symbolic size."""
    if "valid indices" in str(error):
        return "jax.numpy.asarray(size) as the index; or "
    called = list(_called_functions(error))
    name = called[0] if called else ""
    if name == "len" and "interpreted as an integer" in str(error):
        return "x.shape[0] for len(x); or "
    if name not in symbolic_numpy.__all__ and _DERIVED_THERE.search(name):
        name = next((outer for outer in called if outer in _DERIVATIVES), "")
    found = name in symbolic_numpy.__all__
    return f"symbolic_numpy.{name} of pax_export.export; or " if found else ""


def _called_functions(error: Exception) -> Iterator[str]:
    """The names of the functions that the model was calling, from the innermost call."""
    for each in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_of_model(each.filename) and each.lineno and each.colno is not None:
            line = linecache.getline(each.filename, each.lineno).encode()[each.colno :].decode()
            called = re.match(r"[\w.]*\.(?=\w)|", line)
            yield re.match(r"\w*", line[called.end() if called else 0 :])[0]  # type: ignore[index]


_ORDERED = re.compile(r"comparison '(.+?)' ([<>]=?) '(.+?)' is inconclusive")
_EXTREME = re.compile(r"\b(?:min|max)\(")
_NUMBER = re.compile(r"(?:(-?\d+), (.*)|(.*), (-?\d+))")
_DIVIDED = re.compile(r"\b(?:floordiv|mod)\(.*?, (?:- )?(\d+)\b")
#: The number of constraints that are proposed together, and of traces to find each.
_MOST, _TRIALS = 3, 4
#: A bound of a size is looked for up to this one.
_LARGEST = 2**20


def _proposal(error: Exception, names: Sequence[str], retrace: Retrace) -> tuple[str, Exception]:
    """Constraints, or a multiple of a size, with which the model was traced; "" if none helped.

    Then the error is the one that no constraint decides.
    """
    found, undecided = _constraints(error, retrace)
    for each in found[:-1]:  # what a later one implies
        without = tuple(other for other in found if other != each)
        found = without if retrace(without) is None else found
    if found:
        return f"constraints=({' '.join(f'{each!r},' for each in found)}); or ", error
    factor = math.lcm(*map(int, _DIVIDED.findall(str(error))))
    for name in names if factor > 1 else ():
        if retrace(sizes={name: f"{factor}*{name}"}) is None:
            return f"'{factor}*{name}' in its spec; or ", error
    return "", undecided


def _constraints(error: Exception, retrace: Retrace) -> tuple[tuple[str, ...], Exception]:
    """Constraints with which the model was traced, or the last error about a size without any."""
    known: tuple[str, ...] = ()
    for _ in range(_MOST):
        for each in itertools.islice(_decisions(str(error)), _TRIALS):
            other = retrace((*known, each))
            if other is None:
                return (*known, each), error
            is_further = is_of_size(other) or any(_decisions(str(other)))
            if is_further and str(other) != str(error):
                known, error = (*known, each), other
                break
        else:
            break
    return (), error


def _decisions(text: str) -> Iterator[str]:
    """The constraints that decide the comparisons in an error; those of large sizes come first."""
    found: list[tuple[str, str]] = []
    for size, order, bound in _ORDERED.findall(text):
        least = f"{bound} + 1" if order in (">", "<=") else bound
        found.append((f"{size} >= {least}", f"{least} >= {size} + 1"))
    for each in _EXTREME.finditer(text):
        if match := _NUMBER.fullmatch(_balanced(text[each.end() :])):
            size, bound = match[2] or match[3], match[1] or match[4]
            found.append((f"{size} >= {bound}", f"{size} <= {bound}"))
    for sides in found:
        bounds = sorted(map(_of_variable, sides), key=lambda each: ">=" not in each)
        yield from dict.fromkeys((*bounds, *sides))


def _of_variable(constraint: str) -> str:
    """Returns a constraint as a bound of its only variable (``n <= 16``), if it is one."""
    names, holds = dimensions.constrained_names(constraint), partial(dimensions.holds, constraint)
    if len(names) != 1:
        return constraint
    low, high = 1, _LARGEST
    from_above = holds({names[0]: high})
    if holds({names[0]: low}) == from_above:
        return constraint
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds({names[0]: middle}) == from_above else (middle, high)
    return f"{names[0]} >= {high}" if from_above else f"{names[0]} <= {low}"


def _balanced(text: str) -> str:
    """Returns a text up to the bracket that closes one before it."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[:index]
    return text


def _changed_from_inside(error: Exception) -> StateChangeError:
    """The advice for a net of flax.nnx that changes and that a function closes over."""
    return StateChangeError(
        "A call changes the state of a net that the function closes over, and the export "
        "would not.",
        where=_place_of(error),
        got=first_line(error),
        write=f"{EVAL_MODE}the params as the first argument of the function: "
        "`graph, params = nnx.split(net)`, then `nnx.merge(graph, params)(x)` in the function",
    )


def leaves_read(error: Exception, count: int) -> set[int]:
    """Returns the leaves, the first operands, whose values Python reads; empty with other operands.

    jax names the operands that a value depends on, ``operands[3]``, in the text alone.
    """
    found = {int(place) for place in re.findall(r"\boperands\[(\d+)\]", str(error))}
    return found if all(place < count for place in found) else set()


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
    """Returns the innermost line of a model, after the user's line if it is of a library."""
    place = user = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if _is_of_model(file):
            place = f"{Path(file).name}:{line}"
            user = place if is_users(file) else user
    return ", in ".join(dict.fromkeys(filter(None, (user, place))))


def _is_of_model(file: str) -> bool:
    return "jax" not in Path(file).parts and not file.startswith(_NOBODYS)
