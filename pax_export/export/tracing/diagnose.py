"""Turns jax's errors about symbolic dimensions into: which, where, and what to write."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from pax_export._errors import PaxError, SymbolicDimensionError
from pax_export._jax import dimension_value
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import layer_of
from pax_export.export.tracing.spec import Inputs

_PACKAGE = str(Path(__file__).parent.parent)


@contextmanager
def symbolic_errors(
    function: Callable, structs: Sequence[jax.ShapeDtypeStruct], inputs: Inputs
) -> Iterator[None]:
    """Explains an error in its block if a symbolic dimension is the cause.

    The cause is a dimension when the same function can be traced with a number
    in its place; it is found by trying.
    """
    try:
        yield
    except PaxError:
        raise
    except Exception as error:
        guilty = [name for name in inputs.dimensions if _fails(function, structs, inputs, {name})]
        if not guilty and inputs.dimensions and _works(function, structs, inputs):
            guilty = list(inputs.dimensions)
        if not guilty:
            shapes = (f"{e.name}: {e.struct.dtype}{list(e.struct.shape)}" for e in inputs.flat)
            error.add_note(f"The model was traced with the inputs {', '.join(shapes)}.")
            raise
        names = ", ".join(guilty)
        raise SymbolicDimensionError(
            f"The size of the dimension {names} must be known here: {_reason(error)}",
            where=_place(error),
            got=f"the symbolic dimension {names}",
            write=f"a number instead of {guilty[0]!r} in its spec; or operations that work for "
            "every size; or what is known of it, as \"2*n\" or constraints=('n >= 2',)",
        ) from error


def _works(function: Callable, structs: Sequence[Any], inputs: Inputs) -> bool:
    return not _fails(function, structs, inputs, set())


def _fails(function: Callable, structs: Sequence[Any], inputs: Inputs, symbolic: set) -> bool:
    """Whether the trace fails where only these dimensions are symbolic."""
    if symbolic and not _works(function, structs, inputs):
        return False  # it fails for numbers, too: another mistake
    numbers = {
        name: 4 + 2 * index for index, name in enumerate(inputs.dimensions) if name not in symbolic
    }
    try:
        jax.eval_shape(function, [_with_numbers(struct, numbers) for struct in structs])
    except Exception:
        return True
    return False


def _with_numbers(struct: jax.ShapeDtypeStruct, numbers: dict[str, int]) -> jax.ShapeDtypeStruct:
    struct = dtypes.stored(struct)
    shape = [
        dimension_value(size, numbers)
        if isinstance(size, int) or set(dtypes.dimension_names(size)) <= set(numbers)
        else size
        for size in struct.shape
    ]
    return jax.ShapeDtypeStruct(tuple(shape), struct.dtype)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return re.sub(r"\s+", " ", text[0]).rstrip(".") if text else type(error).__name__


def _place(error: Exception) -> str:
    """The innermost line that is not jax's or ours, and the layer that it belongs to."""
    place, owners = "unknown", []
    for frame, line in traceback.walk_tb(error.__traceback__):
        owners.append(frame.f_locals.get("self"))
        name = frame.f_code.co_filename
        if not _is_library(name):
            place = f"{Path(name).name}:{line}"
    layer = layer_of(owners)
    return f"{layer} ({place})" if layer else place


def _is_library(filename: str) -> bool:
    parts = Path(filename).parts
    return "jax" in parts or filename.startswith((_PACKAGE, "<"))
