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
from pax_export.export.tracing.source_lines import is_users
from pax_export.export.tracing.spec import Inputs
from pax_export.export.tracing.traced import for_symbolic_sizes

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
    except Exception as error:  # of the model; raised again if sizes are not the cause
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
        if not guilty and isinstance(error, OF_VALUES):
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
        names, proposal = ", ".join(guilty), _Proposal(function, structs, inputs)
        explained = SymbolicDimensionError(
            f"The size of the dimension {names} must be known here: {first_line(error)}",
            where=_place_of(error),
            got=f"the symbolic dimension {names}",
            write=f"{_as_symbolic(error)}{proposal.text(error, guilty)}a number instead of "
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


_ORDERED = re.compile(r"comparison '(.+?)' ([<>]=?) '(.+?)' is inconclusive")
_EXTREME = re.compile(r"\b(?:min|max)\((-?\d+), ")
_DIVIDED = re.compile(r"\b(?:floordiv|mod)\(.*?, (?:- )?(\d+)\b")
#: The number of constraints that are tried together, and the number of traces for them.
_DEEPEST, _MOST_TRIALS = 3, 12
#: A bound of a size is looked for up to this one.
_LARGEST = 2**20


class _Proposal:
    """Constraints on the sizes of the inputs, or a multiple instead of one, that let the trace be.

    Each is tried before it is proposed.
    """

    def __init__(self, function: Callable, structs: Sequence[Any], inputs: Inputs):
        self._function, self._structs, self._inputs = function, structs, inputs
        self._trials = _MOST_TRIALS

    def text(self, error: Exception, names: Sequence[str]) -> str:
        """Returns what to write, with "; or " after it; "" where nothing that was tried helps."""
        found = self._constraints(error, ())
        if found:
            return f"constraints=({' '.join(f'{each!r},' for each in found)}); or "
        factor = math.lcm(*map(int, _DIVIDED.findall(str(error))))
        for name in names if factor > 1 else ():
            multiple = f"{factor}*{name}"
            if self._fails((), {name: multiple}) is None:
                return f"{multiple!r} in its spec; or "
        return ""

    def _constraints(self, error: Exception, known: tuple[str, ...]) -> tuple[str, ...]:
        """The constraints with which the model can be traced; none if none were found."""
        if len(known) == _DEEPEST:
            return ()
        for each in _decisions(str(error)):
            if each in known:
                continue
            other = self._fails((*known, each))
            if other is None:
                return (*known, each)
            found = () if str(other) == str(error) else self._constraints(other, (*known, each))
            if found:
                return found
        return ()

    def _fails(
        self, constraints: tuple[str, ...], instead: Mapping[str, str] | None = None
    ) -> Exception | None:
        """Returns the error of a trace with these constraints, None if there is none."""
        self._trials -= 1
        if self._trials < 0:
            return RecursionError("too many trials")
        try:
            scope = jax.export.SymbolicScope((*self._inputs.constraints, *constraints))
            given = [_in_scope(dtypes.stored(each), scope, instead or {}) for each in self._structs]
            with for_symbolic_sizes(given):
                jax.eval_shape(self._function, given)
        except Exception as error:  # of jax, or of the model
            return error
        return None


def _in_scope(struct: Any, scope: Any, instead: Mapping[str, str]) -> Any:
    """Returns a struct with its symbolic sizes in another scope, some of them replaced."""
    texts = [str(size) for size in struct.shape]
    for name, text in instead.items():
        texts = [re.sub(rf"\b{name}\b", text, each) for each in texts]
    shape = jax.export.symbolic_shape(", ".join(texts), scope=scope)
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _decisions(text: str) -> Iterator[str]:
    """The constraints that decide the comparisons in an error; those of large sizes come first."""
    found: list[tuple[str, str]] = []
    for each in _EXTREME.finditer(text):
        size, bound = _balanced(text[each.end() :]), each[1]
        found.append((f"{size} >= {bound}", f"{size} <= {bound}"))
    for size, order, bound in _ORDERED.findall(text):
        least = f"{bound} + 1" if order in (">", "<=") else bound
        found.append((f"{size} >= {least}", f"{least} >= {size} + 1"))
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
    return all(
        _fails_with(function, structs, {k: v for k, v in numbers.items() if k not in symbolic})
        for numbers in _some_numbers(structs, inputs)
    )


def _some_numbers(structs: Sequence[Any], inputs: Inputs) -> Iterator[dict[str, int]]:
    """Numbers for the dimensions that constraints allow: small ones, and multiples of many."""
    for first, step in ((4, 2), (840, 840)):
        numbers = {name: first + step * at for at, name in enumerate(inputs.dimensions)}
        if all(dimensions.holds(text, numbers) for text in inputs.constraints):
            yield numbers
    if inputs.constraints:
        yield from dimensions.choose(list(map(dtypes.shape_of, structs)), inputs.constraints)


def _fails_with(function: Callable, structs: Sequence[Any], numbers: dict[str, int]) -> bool:
    try:
        given = [_with_numbers(struct, numbers) for struct in structs]
        with for_symbolic_sizes(given):
            jax.eval_shape(function, given)
    except Exception:  # of jax, or of the model
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
