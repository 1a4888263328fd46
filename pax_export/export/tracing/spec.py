"""`spec`: the shape, dtype and name of one input, as a user describes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._foundations import tables
from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import DTypeLike

#: What errors about inputs suggest.
EXAMPLE = 'spec("batch, 28, 28, 1")'
_INTEGER = re.compile("-?[0-9]{1,18}")


@dataclass(frozen=True)
class InputSpec:
    """The shape, dtype and name of one input; created by `spec`."""

    shape: str | tuple[int | str | None, ...]
    dtype: str
    name: str | None = None

    def _repr_html_(self) -> str:
        shape = self.shape
        if not isinstance(shape, str):
            shape = ", ".join("?" if size is None else str(size) for size in shape)
        name = f"{self.name}: " if self.name else ""
        return tables.block("", tables.grid((), [[f"{name}{self.dtype}[{shape}]"]]))


def spec(
    shape: str | Sequence[int | str | None], dtype: DTypeLike = "float32", name: str | None = None
) -> InputSpec:
    """Describes one input of an exported model.

    Args:
        shape: the dimensions, as a string (``"batch, 28, 28, 1"``) or a sequence (``("batch", 28,
            28, 1)``).  A name is a symbolic dimension: the exported model accepts any size there,
            and equal names mean equal sizes, in all inputs of one export.  Expressions (``"2*n"``)
            work as in `jax.export.symbolic_shape`.  ``None`` is a symbolic dimension with a unique
            name, also in a string (``"None, 28, 28, 1"``).
        dtype: the dtype, or its name.  ``"string"`` is text, for preprocessors only.
        name: the input's name in the signature; default: the name of the Python parameter.

    Returns:
        An input spec for the ``inputs`` of an exporter.

    Raises:
        InvalidArgumentTypeError: a dimension or the dtype has another type.

    Example:
        >>> spec(("batch", 28, 28, 1)).shape
        ('batch', 28, 28, 1)
        >>> spec("batch, length", "int32", name="tokens").name
        'tokens'
    """
    if isinstance(shape, str):
        for size in shape.split(","):
            _check_dimension(int(size) if _INTEGER.fullmatch(size.strip()) else size)
    elif isinstance(shape, Iterable):
        shape = tuple(_check_dimension(size) for size in shape)
    else:
        raise InvalidArgumentTypeError(
            "A shape must be a string or a sequence of dimensions.", got=repr(shape), write=EXAMPLE
        )
    return InputSpec(shape, _dtype_name(dtype), name)


def _check_dimension(size: int | str | None) -> int | str | None:
    if size is None or isinstance(size, str):
        return size
    if isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    raise InvalidArgumentTypeError(
        "A dimension must be a size, the name of a symbolic dimension, or None.",
        got=repr(size),
        write=EXAMPLE,
    )


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        if dtype is None:
            raise TypeError  # numpy would read it as float64
        if dtype is object or getattr(dtype, "name", dtype) == "string":
            return "string"
        known = np.dtype(dtype)
        return "string" if known.kind in "OSU" else known.name
    except TypeError as error:
        raise InvalidArgumentTypeError(
            "The dtype is unknown.", got=repr(dtype), write='spec("batch, 3", "float32")'
        ) from error


def from_tensorflow(leaf: Any) -> Any:
    """Converts a `tf.TensorSpec` or a tensor to a `spec`; returns other values unchanged."""
    if not hasattr(getattr(leaf, "dtype", None), "as_numpy_dtype"):
        return leaf
    return spec(leaf.shape.as_list(), leaf.dtype.name, getattr(leaf, "name", None))
