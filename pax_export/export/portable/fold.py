"""Folds scales, shifts and padding into convolutions and products.

``(x * w - mean) * scale + bias`` is ``x * (w * scale) + (bias - mean * scale)``, so that a
BatchNorm after a convolution disappears. The products of weights are left to `arithmetic.py`. Only
numbers of 32 bits and more are folded, if the weights are read once, and the folded ones are
finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, is_literal
from pax_export._foundations.types import Array, Atom, Equation
from pax_export.export.portable import kept
from pax_export.export.portable.arithmetic import KnownValues
from pax_export.export.portable.program import PortableProgram, again, is_static, source_of, uses
from pax_export.export.portable.sizes import is_number
from pax_export.precision.quantized import bound_outputs

_FOLDED = frozenset({"float32", "float64"})
_LINEAR = frozenset({"mul", "div", "add", "sub"})


@dataclass(frozen=True)
class Vector:
    """A known array with one number per feature, or a single one: traced, and its values."""

    traced: Any
    values: np.ndarray


@dataclass(frozen=True)
class BroadcastArray:
    """A known array broadcast to a larger one.

    Attributes:
        vector: its numbers; a vector or a scalar.
        axis: the axis of the vector; None for a scalar.
        whole: the larger array.
    """

    vector: Vector
    axis: int | None
    whole: Any


@dataclass(frozen=True)
class Product:
    """A convolution or product not written yet, because it may still be scaled."""

    equation: Any
    operands: tuple[Any, Any]
    feature: int  # axis of the result
    feature_of_kernel: int
    scale: Vector | None = None
    shift: Vector | None = None
    ends: tuple[Any, Any] | None = None  # known ranges, of each feature


def folded(program: PortableProgram) -> PortableProgram:
    """The program without scales and shifts after convolutions and products."""
    return _Folding(program).made()


class _Folding:
    def __init__(self, program: PortableProgram):
        self._program = program
        self._known = KnownValues(program)
        self._uses = uses(program.jaxpr)
        self._quantized: dict[Any, tuple[Equation, list[Any]]] = {}
        self._notes: list[str] = []

    def made(self) -> PortableProgram:
        program = self._program.rebuilt(self._operate, unwrap=self._array)
        return program.noted(*self._notes)

    def _operate(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "broadcast_in_dim":
            spread = self._spread(equation, operands)
            if spread is not None:
                return [spread]
        if name in _LINEAR:
            scaled = self._scaled(equation, operands)
            if scaled is not None:
                return [scaled]
        if name == "bound_outputs":
            return [self._bounded(equation, *operands)]
        arrays = [self._array(each) for each in operands]
        product = self._product(equation, arrays)
        if product is not None:
            return [product]
        results = bind_equation(equation, arrays)
        if name == "dequantize":
            self._quantized[equation.outvars[0]] = equation, arrays
        return results

    # The forms of known arrays.

    def _spread(self, equation: Equation, operands: Sequence[Any]) -> BroadcastArray | None:
        """Returns a broadcast known vector or number; also one with axes of size 1."""
        (atom, *rest), (x, *_) = equation.invars, operands
        if rest:
            return None
        axes = equation.params["broadcast_dimensions"]
        result = equation.outvars[0].aval
        if isinstance(x, BroadcastArray):
            axis = None if x.axis is None else axes[x.axis]
            return BroadcastArray(x.vector, axis, *bind_equation(equation, [x.whole]))
        if atom not in self._known or result.dtype.name not in _FOLDED:
            return None
        vector = self._vector(atom, x)
        if vector is None:
            return None
        of_atom = [i for i, size in enumerate(atom.aval.shape) if size != 1]
        axis = axes[of_atom[0]] if of_atom else None
        return BroadcastArray(vector, axis, *bind_equation(equation, [self._array(x)]))

    def _vector(self, atom: Atom, x: Array) -> Vector | None:
        """Returns a known array with at most one axis longer than 1."""
        shape = atom.aval.shape
        if not is_static(shape) or sum(size != 1 for size in shape) > 1:
            return None
        values = np.asarray(self._known.array(atom), np.float64)
        several = values.size != 1
        traced = lax.reshape(self._array(x), (values.size,) if several else ())
        return Vector(traced, values.reshape(traced.shape))

    def _vector_for(self, product: Product, atom: Atom, x: Array) -> Vector | None:
        """An operand as one number for each feature of a product; None if it is none."""
        if isinstance(x, BroadcastArray):
            along = x.axis is None or x.axis == product.feature
            return x.vector if along else None
        if atom not in self._known:
            return None
        shape = atom.aval.shape
        if any(size != 1 for axis, size in enumerate(shape) if axis != product.feature):
            return None
        if len(shape) not in (0, len(product.equation.outvars[0].aval.shape)):
            return None
        return self._vector(atom, x)

    # The folded operations.

    def _product(self, equation: Equation, arrays: Sequence[Any]) -> Product | None:
        name = equation.primitive.name
        if name == "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            axes = numbers.out_spec[1], numbers.rhs_spec[0]
            if equation.params["batch_group_count"] != 1:
                return None
        elif name == "dot_general":
            (_, contracted), (batch, _) = equation.params["dimension_numbers"]
            kernel = equation.invars[1].aval
            free = [axis for axis in range(kernel.ndim) if axis not in contracted]
            if batch or len(free) != 1:
                return None
            axes = equation.outvars[0].aval.ndim - 1, free[0]
        else:
            return None
        kernel, (result,) = equation.invars[1], equation.outvars
        dtypes = {each.aval.dtype.name for each in (*equation.invars, result)}
        if len(dtypes) != 1 or not dtypes <= _FOLDED or self._uses.get(result) != 1:
            return None
        if is_literal(kernel) or equation.invars[0] in self._known:
            return None
        if self._scales(kernel, axes[1]) is not None:
            once = self._uses.get(kernel) == 1
            return Product(equation, (arrays[0], arrays[1]), *axes) if once else None
        if kernel not in self._known:
            return None
        if self._uses.get(kernel) != 1 or self._uses.get(self._known.root(kernel)) != 1:
            return None  # a second copy of it would be stored
        return Product(equation, (arrays[0], arrays[1]), *axes)

    def _scales(self, kernel: Any, feature: int) -> Any:
        """Returns the scales of a quantized kernel with one per feature, to be folded."""
        if kernel not in self._quantized:
            return None
        equation, _ = self._quantized[kernel]
        atom: Any = equation.invars[1]
        others = (size for axis, size in enumerate(atom.aval.shape) if axis != feature)
        is_plain = equation.params["group"] is None and atom.aval.dtype.name in _FOLDED
        known = atom in self._known and equation.invars[0] in self._known
        return atom if is_plain and known and all(each == 1 for each in others) else None

    def _bounded(self, equation: Equation, y: Any, *_: Any) -> Any:
        """Takes the ranges of a product's features, which scales and shifts move."""
        atoms = equation.invars[1:]
        if not all(atom in self._known for atom in atoms):
            return self._array(y)
        low, high = (np.asarray(self._known.array(atom), np.float64) for atom in atoms)
        if not isinstance(y, Product):
            return _of_range(y, low, high)
        bounded = replace(y, ends=(low, high))
        return bounded if self._uses.get(equation.outvars[0]) == 1 else self._array(bounded)

    def _scaled(self, equation: Equation, operands: list[Any]) -> Product | None:
        """Returns the product after this operation; None if it cannot be folded."""
        (left, right), (x, y), name = equation.invars, operands, equation.primitive.name
        if isinstance(x, Product):
            product, vector = x, self._vector_for(x, right, y)
            first = True
        elif isinstance(y, Product) and name != "div":
            product, vector = y, self._vector_for(y, left, x)
            first = False
        else:
            return None
        shapes = [each.outvars[0].aval.shape for each in (equation, product.equation)]
        if vector is None or shapes[0] != shapes[1]:
            return None
        turns = name == "sub" and not first
        turns = turns or (name in ("mul", "div") and bool((vector.values <= 0).any()))
        if turns and product.equation.invars[1] in self._quantized:
            return None  # its integers would need other signs
        if name in ("mul", "div"):
            scaled = _times(product, vector if name == "mul" else _inverse(vector))
        elif name == "add":
            scaled = _plus(product, vector)
        elif first:
            scaled = _plus(product, _product_of(_MINUS, vector))
        else:  # a known array minus the product
            scaled = _plus(_times(product, _MINUS), vector)
        if not self._is_finite(scaled):
            kernel = product.equation.invars[1]
            known = kernel in self._known
            named = ", ".join(self._known.sources(kernel)[:1]) if known else "a quantized weight"
            self._notes.append(f"{named} is not folded: its numbers would not be finite")
            return None
        # The reader of the result decides whether it is read once.
        return scaled if self._uses.get(equation.outvars[0]) == 1 else self._array(scaled)

    def _is_finite(self, product: Product) -> bool:
        """Returns whether the folded weights are finite, and no tiny ones are lost."""
        equation = product.equation
        limits = jnp.finfo(equation.outvars[0].aval.dtype)
        if product.shift is not None and not np.all(np.abs(product.shift.values) <= limits.max):
            return False
        if product.scale is None:
            return True
        atom = self._scales(equation.invars[1], product.feature_of_kernel)
        atom = equation.invars[1] if atom is None else atom
        kernel = np.abs(np.asarray(self._known.array(atom), np.float64))
        axes = tuple(axis for axis in range(kernel.ndim) if axis != product.feature_of_kernel)
        most = kernel.max(axes, initial=0) * np.abs(product.scale.values)
        return bool(np.all(most <= limits.max))

    def _array(self, value: object) -> Any:
        """A value as an array of the new program."""
        if isinstance(value, BroadcastArray):
            return value.whole
        if not isinstance(value, Product):
            return value
        with source_of(value.equation):  # not the source of its reader
            return self._whole(value)

    def _whole(self, value: Product) -> Any:
        x, kernel = value.operands
        if value.scale is not None:
            along = _along(value.scale.traced, kernel.ndim, value.feature_of_kernel)
            quantized = self._quantized.get(value.equation.invars[1])
            if quantized is None:
                kernel = kernel * along
            else:
                equation, (integers, scales, *zeros) = quantized
                (kernel,) = again(equation, [integers, scales * along, *zeros])
        (result,) = again(value.equation, [x, kernel])
        if value.shift is not None:
            shift = jnp.broadcast_to(value.shift.traced, (result.shape[value.feature],))
            whole = lax.broadcast_in_dim(shift, result.shape, (value.feature,))
            result = lax.add(result, whole)
        return result if value.ends is None else _of_range(result, *value.ends)


def _of_range(y: Array, low: np.ndarray, high: np.ndarray) -> Any:
    """An array with the range of all its features."""
    return bound_outputs(y, np.float32(low.min()), np.float32(high.max()))


_MINUS = Vector(np.float32(-1), np.asarray(-1.0))


def _along(vector: Array, rank: int, axis: int) -> Any:
    if not np.ndim(vector):
        return vector
    return lax.expand_dims(vector, [each for each in range(rank) if each != axis])


def _inverse(vector: Vector) -> Vector:
    with np.errstate(all="ignore"):
        return Vector(1 / vector.traced, 1 / vector.values)


def _times(product: Product, by: Vector) -> Product:
    with np.errstate(all="ignore"):
        scale = by if product.scale is None else _product_of(product.scale, by)
        shift = None if product.shift is None else _product_of(product.shift, by)
    ends = product.ends and tuple(each * by.values for each in product.ends)
    ends = ends and (np.minimum(*ends), np.maximum(*ends))  # a negative scale turns them
    return replace(product, scale=scale, shift=shift, ends=ends)


def _plus(product: Product, by: Vector) -> Product:
    shift = by
    if product.shift is not None:
        with np.errstate(all="ignore"):
            shift = Vector(product.shift.traced + by.traced, product.shift.values + by.values)
    ends = product.ends and tuple(each + by.values for each in product.ends)
    return replace(product, shift=shift, ends=ends)


def _product_of(one: Vector, other: Vector) -> Vector:
    return Vector(one.traced * other.traced, one.values * other.values)


# --- Moves padding into the following convolution or pool ---


#: The padding values.
_NEUTRAL = {
    "conv_general_dilated": 0.0, "reduce_window_sum": 0.0,
    "reduce_window_max": -np.inf, "reduce_window_min": np.inf,
}  # fmt: skip


def padded_inside(program: PortableProgram) -> PortableProgram:
    """Returns the program with paddings moved into the convolutions and pools that read them."""
    known = KnownValues(program)
    pads: dict[Any, tuple[Any, Any]] = {}

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name == "pad":
            pads[equation.outvars[0]] = equation, operands[0]
        neutral = _NEUTRAL.get(name)
        found = None if neutral is None else pads.get(equation.invars[0])
        if found is not None:
            pad, x = found
            padding = _combine_padding(equation, pad)
            value = pad.invars[1]
            if padding is not None and value in known and is_neutral(equation, pad, padding):
                return again(equation, [x, *operands[1:]], padding=padding)
        return bind_equation(equation, operands)

    def is_neutral(equation: Equation, pad: Equation, padding: Sequence[tuple[int, int]]) -> bool:
        number = known.fixed(pad.invars[1])
        if number is None:
            return False
        if number == _NEUTRAL[equation.primitive.name]:
            return True
        if equation.primitive.name != "reduce_window_max" or pad.invars[0] not in at_least:
            return False
        # Nothing is smaller, and every window has something that is no padding.
        widths = equation.params["window_dimensions"]
        inside = all(max(ends) < width for ends, width in zip(padding, widths))
        return bool(inside and number <= at_least[pad.invars[0]])

    operations = ((each.outvars, *kept.operation(each)) for each in program.jaxpr.eqns)
    clips = ((results[0], params) for results, name, params in operations if name == "clip")
    at_least = {result: params.get("low", -np.inf) for result, params in clips}
    if not any(each.primitive.name == "pad" for each in program.jaxpr.eqns):
        return program
    return program.rebuilt(operate)


def _combine_padding(equation: Equation, pad: Equation) -> tuple[tuple[int, int], ...] | None:
    """Returns the sum of both paddings, or None if it is not equivalent."""
    config, params = pad.params["padding_config"], equation.params
    if not all(is_number(n) for ends in (*config, *params["padding"]) for n in ends):
        return None
    if any(inner or low < 0 or high < 0 for low, high, inner in config):
        return None
    outer = [(low, high) for low, high, _ in config]
    if equation.primitive.name == "conv_general_dilated":
        batch, feature, *space = params["dimension_numbers"].lhs_spec
        if any(outer[batch] + outer[feature]):
            return None
        outer = [outer[axis] for axis in space]
    dilation = params["lhs_dilation" if "lhs_dilation" in params else "base_dilation"]
    if any(each != 1 for each in dilation):
        return None
    both = zip(params["padding"], outer)
    return tuple((int(low + more[0]), int(high + more[1])) for (low, high), more in both)
