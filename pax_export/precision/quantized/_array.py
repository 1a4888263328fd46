"""QuantizedArray: integers and scales instead of a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pax_export._foundations.types import Array, DTypeLike
from pax_export.core import Module, StateModule
from pax_export.precision.quantized._blocks import is_read_in_blocks
from pax_export.precision.quantized._integers import Form
from pax_export.precision.quantized._operations import (
    dequantize,
    narrow_dot,
    quantized_dot,
    quantized_rows,
)


class ArrayLike:
    """The interface that jax functions and layers expect of a module that represents an array.

    Methods, properties and operators of arrays are those of the dequantized one; ``%``, ``==`` and
    `at` are those of modules.
    """

    __array_ufunc__ = None  # so that `array @ this` of numpy asks here
    #: Rounds the inputs of products with it; None: float inputs.
    inputs: Any = None
    #: The range of the outputs of convolutions with it; None: unknown.
    outputs: Any = None

    def rounded_inputs(self, x: Array, axes: Sequence[int] = (-1,)) -> Any:
        """Rounds the inputs of a product; dynamic scales are shared along ``axes``."""
        return x if self.inputs is None else self.inputs.rounded(x, axes)

    def bounded_outputs(self, y: Array, axis: int) -> Any:
        """Annotates the outputs of a convolution with their range; channels are along ``axis``."""
        return y if self.outputs is None else self.outputs.bounded(y, axis)

    @property
    def ndim(self) -> int:
        """The rank of the represented array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The size of the represented array."""
        return math.prod(self.shape)

    def dequantized(self) -> jax.Array:
        raise NotImplementedError

    def __jax_array__(self) -> jax.Array:
        return self.dequantized()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.dequantized(), dtype)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the represented array in a dtype."""
        return self.dequantized().astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ARRAYS:
            return getattr(self.dequantized(), name)
        return getattr(super(), "__getattr__")(name)  # noqa: B009 - that of modules

    def __getitem__(self, index: Array) -> jax.Array:
        return self.dequantized()[index]

    def __matmul__(self, other: Array) -> jax.Array:
        return self.dequantized() @ other

    def __rmatmul__(self, other: object) -> jax.Array:
        return times(jnp.asarray(other), self)


def _operator(name: str) -> Callable[..., Any]:
    def of_array(self: Any, *operands: Any) -> Any:
        return getattr(self.dequantized(), name)(*operands)

    of_array.__name__ = name
    return of_array


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv pow rpow neg pos abs lt le gt "
    "ge round len iter"
).split():
    setattr(ArrayLike, f"__{_name}__", _operator(f"__{_name}__"))
_OF_ARRAYS = {name for name in {*dir(jax.Array)} & {*dir(np.ndarray)} if name[0] != "_"}


class QuantizedArray(ArrayLike, StateModule):
    """Integers and scales that represent an array: ``(integers - zeros) * scales``.

    `quantize` replaces weights by them. Layers multiply with them directly; other functions of jax
    get the dequantized array. They are not trained.

    Args:
        integers: int8; of 4 bits two in each byte, along ``axis``; float8 of scheme ``"float"``.
        scales: one per channel, broadcast to the array, or with ``group`` one per group along
            ``axis``.
        form: the format of the integers.
        inputs: rounds the inputs of products to 8 bits: `StaticInputs` or `DynamicInputs`.
        zeros: the zero point of each group; None if it is 0.
        outputs: the `OutputRange` of convolutions with it, for files.

    Attributes:
        integers: as passed.
        scales: as passed.
        zeros: as passed.
        inputs: as passed; None for unrounded inputs.
        outputs: as passed; None if it is unknown.
        form: the ``bits``, the ``group``, the ``axis``, the ``dtype`` and the ``scheme``.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> small, report = pax.quantize(pax.Linear(64, 8), bits=4)
        >>> small.weight
        QuantizedArray(float32[64,8], bits=4, group=32)
        >>> small.weight.integers.shape, small.weight.scales.dtype
        ((32, 8), dtype('float16'))
        >>> jnp.asarray(small.weight).shape
        (64, 8)
    """

    def __init__(
        self,
        integers: Array,
        scales: Array,
        form: Form,
        inputs: Module | None = None,
        zeros: Array | None = None,
        outputs: Module | None = None,
    ):
        super().__init__()
        self.integers = integers
        self.scales = scales
        self.form = form
        self.inputs = inputs
        self.zeros = zeros
        self.outputs = outputs

    @property
    def stored(self) -> tuple[jax.Array, ...]:
        """Integers, scales, and zero points if there are any."""
        arrays = (self.integers, self.scales, self.zeros)
        return tuple(jnp.asarray(each) for each in arrays if each is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the represented array."""
        return self.form.shape(self.integers.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the represented array."""
        return jnp.dtype(self.form.dtype)

    @property
    def nbytes(self) -> int:
        """The size of integers, scales and zero points."""
        arrays = (self.integers, self.scales, self.zeros)
        return sum(each.nbytes for each in arrays if each is not None)

    def dequantized(self) -> jax.Array:
        """Returns the represented array."""
        return dequantize(*self.stored, form=self.form)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        shape = ",".join(map(str, getattr(self.integers, "shape", ()) and self.shape))
        group = "" if self.form.group is None else f", group={self.form.group}"
        scheme = "" if self.form.scheme == "symmetric" else f", scheme={self.form.scheme!r}"
        return f"QuantizedArray({self.form.dtype}[{shape}], bits={self.form.bits}{group}{scheme})"


def times(x: Array, weight: Array | ArrayLike) -> jax.Array:
    """``jnp.dot(x, weight)``, for a weight that may be quantized."""
    x = _inputs(x, weight)
    if not isinstance(weight, QuantizedArray):
        numbers = _numbers(weight)
        if is_read_in_blocks(x, numbers, -2):
            return narrow_dot(x, numbers, -2, jnp.result_type(x, numbers))
        return jnp.dot(x, numbers)
    return _product(x, weight, -2)


def times_transposed(x: jax.Array, weight: Array | ArrayLike, dtype: DTypeLike) -> jax.Array:
    """``x · weightᵀ`` in a dtype, for a weight ``[outputs, inputs]`` that may be quantized."""
    x = _inputs(x, weight)
    if not isinstance(weight, QuantizedArray):
        numbers = _numbers(weight)
        if is_read_in_blocks(x, numbers, -1):
            return narrow_dot(x, numbers, -1, dtype)
        return jnp.einsum("...d,vd->...v", x, numbers, preferred_element_type=dtype)
    return _product(x, weight, -1).astype(dtype)


def _inputs(x: Array, weight: Array | ArrayLike) -> Any:
    return weight.rounded_inputs(x) if isinstance(weight, ArrayLike) else x


def _numbers(weight: Array | ArrayLike) -> Any:
    return weight.dequantized() if isinstance(weight, ArrayLike) else weight


def _product(x: Array, weight: QuantizedArray, contracted: int) -> jax.Array:
    form = weight.form
    if weight.ndim != 2 or form.axis != contracted:
        numbers = weight.dequantized()
        return jnp.dot(x, numbers if contracted == -2 else numbers.T)
    return quantized_dot(x, *weight.stored, form=form, contracted=contracted)


def rows(table: Array | ArrayLike, index: Array) -> jax.Array:
    """``table[index]``, for a table that may be quantized."""
    if not isinstance(table, QuantizedArray):
        return _numbers(table)[index]
    if table.ndim != 2 or table.form.axis != -1:
        return table.dequantized()[index]
    return quantized_rows(index, *table.stored, form=table.form)
