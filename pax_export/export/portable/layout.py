"""Chooses the runtime's layout for convolutions and pools, and cancels transposes.

ONNX convolves ``[batch, features, height, width]`` and TFLite ``[batch, height, width, features]``;
a model may have the other. Here a value may have another order of axes than in the program: a
convolution returns the runtime's order, elementwise operations keep the order, and others permute
their axes. Operations without a rule get the program's order, by one transpose. In programs whose
convolutions have the runtime's layout, only transposes around batched products, as of attention,
are moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, is_literal, needed_equations
from pax_export._foundations.types import Array, Equation
from pax_export.export.portable import kept
from pax_export.export.portable.program import PortableProgram, again
from pax_export.export.portable.sizes import same_size

Order = tuple[int, ...]
_CONV = "conv_general_dilated"
_POOLS = frozenset({"reduce_window_max", "reduce_window_sum"})


class Laid:
    """An array in some order of axes; `order[i]` is the program's axis at position i."""

    def __init__(self, array: Array, order: Order):
        self._arrays = {order: array}
        self.order = order

    @property
    def rank(self) -> int:
        return len(self.order)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes, in the order of the program."""
        sizes = dict(zip(self.order, self._arrays[self.order].shape))
        return tuple(sizes[axis] for axis in range(self.rank))

    @property
    def is_plain(self) -> bool:
        return self.order == plain(self.rank)

    def position(self, axis: int) -> int:
        """Returns the position of an axis of the program."""
        return self.order.index(axis)

    def lying(self, order: Order) -> Any:
        """The array in another order; made once for each."""
        if order not in self._arrays:
            moved = [self.order.index(axis) for axis in order]
            self._arrays[order] = lax.transpose(self._arrays[self.order], moved)
        return self._arrays[order]


class LazyBroadcast(Laid):
    """An array that a smaller one is broadcast to, made in each order without a transpose."""

    def __init__(self, source: Laid, shape: tuple[Any, ...], axes: Sequence[int]):
        self._arrays = {}
        self.order = plain(len(shape))
        self.source, self._shape, self.axes = source, shape, tuple(axes)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self._shape

    def lying(self, order: Order) -> Any:
        if order not in self._arrays:
            positions = {axis: i for i, axis in enumerate(order)}
            # The axes of the smaller array in their future order.
            inner = tuple(sorted(range(len(self.axes)), key=lambda i: positions[self.axes[i]]))
            to = tuple(positions[self.axes[i]] for i in inner)
            shape = tuple(self._shape[axis] for axis in order)
            self._arrays[order] = lax.broadcast_in_dim(self.source.lying(inner), shape, to)
        return self._arrays[order]


def plain(rank: int) -> Order:
    return tuple(range(rank))


def inverse(order: Sequence[int]) -> Order:
    return tuple(sorted(range(len(order)), key=lambda i: order[i]))


#: Rules that carry an order through an operation: (equation, operands) to results; None if it
#: cannot, for these operands.
Rule = Callable[[Any, list[Any]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def laid_out(program: PortableProgram, features_first: bool) -> PortableProgram:
    """Returns the program with fewer transposes.

    Convolutions get the layout of ``[batch, features, ...]``, or without `features_first` that of
    ``[batch, ..., features]``.
    """
    equations = needed_equations(program.jaxpr)
    moves_all = any(_is_laid_otherwise(each, features_first) for each in equations)
    moved = set() if moves_all else _around_products(equations)
    if not moved and not moves_all:
        return program

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        values = [_laid(each) for each in operands]
        name = equation.primitive.name
        is_moved = moves_all or (
            name != _CONV
            and (
                name == "broadcast_in_dim"
                or not moved.isdisjoint(equation.outvars)
                or any(isinstance(x, LazyBroadcast) or not x.is_plain for x in values)
            )
        )
        results = None
        if is_moved and name == _CONV:
            results = _convolved(equation, values, features_first)
        elif is_moved and name in RULES:
            if name in _POOLS and not features_first and values[0].is_plain:
                order = _pool_order(equation)
                values = [Laid(values[0].lying(order), order)]
            results = RULES[name](equation, values)
        if results is None:
            results = bind_equation(equation, [array_of(each) for each in values])
        return [_laid(each) for each in results]

    return program.rebuilt(operate, _laid, array_of)


def _is_laid_otherwise(equation: Equation, features_first: bool) -> bool:
    if equation.primitive.name in _POOLS and not features_first:
        return _pool_order(equation) != plain(equation.invars[0].aval.ndim)
    if features_first or equation.primitive.name != _CONV:
        return equation.primitive.name == _CONV  # ONNX's biases meet their products in any net
    x, _, result = _layouts(equation, features_first)
    return (x, result) != (plain(len(x)), plain(len(x)))


def _pool_order(equation: Equation) -> Order:
    """Returns the program's axes of a pool with the features last."""
    params, rank = equation.params, equation.invars[0].aval.ndim
    names = ("window_dimensions", "window_strides", "padding")
    windows = [*zip(*(params[name] for name in names))]
    space = [axis for axis, window in enumerate(windows) if window != (1, 1, (0, 0))]
    is_first = rank > 2 and space == [*range(2, rank)]
    return (0, *space, 1) if is_first else plain(rank)


def _layouts(equation: Equation, features_first: bool) -> tuple[Order, Order, Order]:
    """Returns the program's axes of images, kernel and result in the order of a runtime."""
    numbers = equation.params["dimension_numbers"]
    if features_first:
        return tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)
    (batch, features, *space), (out, *kernel) = numbers.lhs_spec, numbers.rhs_spec
    result, channels, *spatial = numbers.out_spec
    return (batch, *space, features), (*kernel[1:], kernel[0], out), (result, *spatial, channels)


def _convolved(
    equation: Equation, operands: Sequence[Laid], features_first: bool
) -> Sequence[Laid]:
    (x, kernel), orders = operands, _layouts(equation, features_first)
    first, last = plain(x.rank), (0, x.rank - 1, *range(1, x.rank - 1))
    results = again(
        equation,
        [x.lying(orders[0]), kernel.lying(orders[1])],
        dimension_numbers=lax.ConvDimensionNumbers(first, first, first)
        if features_first
        else lax.ConvDimensionNumbers(last, (x.rank - 1, x.rank - 2, *range(x.rank - 2)), last),
    )
    return [Laid(results[0], orders[2])]


def _around_products(equations: Sequence[Any]) -> set[Any]:
    """Returns the results of batched products, and of transposes that products may take over.

    They are of operands, or of what is computed elementwise from a product. Other transposes may
    be of arrays much smaller than those in which they would end.
    """
    products = [each for each in equations if is_batched_product(each)]
    read = {atom for each in products for atom in each.invars if not is_literal(atom)}
    moved = {result for each in products for result in each.outvars}
    after = set(moved)
    for equation in equations:
        name, (result, *_) = equation.primitive.name, equation.outvars
        follows = any(atom in after for atom in equation.invars if not is_literal(atom))
        if name == "transpose" and (follows or result in read):
            moved.add(result)
        if follows and (name in ("transpose", "composite") or RULES.get(name) is RULES["add"]):
            after.add(result)
    return moved


def is_batched_product(equation: Equation) -> bool:
    """Returns whether an equation is a product of matrices of a batch."""
    if equation.primitive.name != "dot_general":
        return False
    return bool(equation.params["dimension_numbers"][1][0])


def _laid(value: Any) -> Laid:
    return value if isinstance(value, Laid) else Laid(value, plain(getattr(value, "ndim", 0)))


def array_of(value: Any) -> Any:
    return value.lying(plain(value.rank)) if isinstance(value, Laid) else value


# --- Layout rules: how each operation permutes its axes ---


Operands = list[Any]
Results = Sequence[Any] | None


@rule("dot_general")
def dot_general(equation: Equation, operands: Operands) -> Results:
    if not is_batched_product(equation):
        return None
    x, y = operands
    (x_sum, y_sum), (x_batch, y_batch) = equation.params["dimension_numbers"]
    left, right = _Factor(x, x_sum, x_batch), _Factor(y, y_sum, y_batch)
    # The program's number of each axis of the result.
    count = len(x_batch)
    of_x = {axis: count + i for i, axis in enumerate(left.free)}
    of_y = {axis: count + len(of_x) + i for i, axis in enumerate(right.free)}
    factors = [(left, of_x), (right, of_y)]
    if left.is_moved(first=True) + right.is_moved() > right.is_moved(first=True) + left.is_moved():
        factors.reverse()
    (one, _), (other, _) = factors
    results = again(
        equation,
        [one.value.lying(one.value.order), other.value.lying(other.value.order)],
        dimension_numbers=(
            (one.positions_of(one.sums), other.positions_of(other.sums)),
            (one.positions_of(one.batch), other.positions_of(other.batch)),
        ),
    )
    free = [axes[axis] for each, axes in factors for axis in each.value.order if axis in axes]
    return [Laid(results[0], (*range(count), *free))]


class _Factor:
    def __init__(self, value: Laid, sums: Sequence[int], batch: Sequence[int]):
        self.value, self.sums, self.batch = value, sums, batch
        self.free = [axis for axis in range(value.rank) if axis not in (*sums, *batch)]

    def positions_of(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self.value.position, axes))

    def is_moved(self, first: bool = False) -> bool:
        """Returns whether runtimes need another order, as the first or the second operand.

        They exchange two axes of a matrix themselves.
        """
        free = sorted(self.positions_of(self.free))
        rest = [[*free, *self.positions_of(self.sums)], [*self.positions_of(self.sums), *free]]
        orders = rest if len(free) == len(self.sums) == 1 else rest[:1] if first else rest[1:]
        return all(
            [*self.positions_of(self.batch), *each] != [*range(self.value.rank)] for each in orders
        )


@rule("transpose")
def transpose(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    back = inverse(equation.params["permutation"])
    if isinstance(x, LazyBroadcast):
        shape = tuple(x.shape[axis] for axis in equation.params["permutation"])
        return [LazyBroadcast(x.source, shape, [back[axis] for axis in x.axes])]
    return [Laid(x.lying(x.order), tuple(back[axis] for axis in x.order))]


@rule("broadcast_in_dim")
def broadcast_in_dim(equation: Equation, operands: Operands) -> Results:
    if len(operands) != 1:
        return None
    (x,) = operands
    axes = equation.params["broadcast_dimensions"]
    shape = tuple(equation.params["shape"])
    if isinstance(x, LazyBroadcast):
        return [LazyBroadcast(x.source, shape, [axes[axis] for axis in x.axes])]
    return [LazyBroadcast(x, shape, axes)]


def _common(operands: Sequence[Laid]) -> Order:
    """Returns the order of most operands; preferably one other than the program's."""
    orders = [each.order for each in operands if not isinstance(each, LazyBroadcast)]
    others = [order for order in orders if order != plain(len(order))]
    return max(others, key=others.count) if others else plain(operands[0].rank)


def elementwise(equation: Equation, operands: Operands) -> Results:
    rank = equation.outvars[0].aval.ndim
    whole = [each for each in operands if each.rank == rank]
    if not rank or any(each.rank not in (0, rank) for each in operands):
        return None
    if all(isinstance(each, LazyBroadcast) for each in whole):
        spread = [each for each in whole if each.source.rank]
        if len(spread) == 1:
            return _of_source(equation, operands, spread[0])
    order = _common(whole)
    if order == plain(rank):
        return None
    arrays = [each.lying(order) if each.rank else array_of(each) for each in operands]
    changed = {}
    if "shape" in equation.params:
        changed["shape"] = tuple(equation.params["shape"][axis] for axis in order)
    return [Laid(result, order) for result in again(equation, arrays, **changed)]


def _of_source(equation: Equation, operands: Operands, x: LazyBroadcast) -> Results:
    """Applies an operation on a broadcast array before the broadcast."""
    if len(equation.outvars) != 1 or "shape" in equation.params or "sharding" in equation.params:
        return None
    inner = x.source.order
    sources = [each.source if isinstance(each, LazyBroadcast) else each for each in operands]
    arrays = [each.lying(each.order) for each in sources]
    if equation.primitive.name == "select_n":  # whose cases have one shape
        shape = x.source.lying(inner).shape
        cases = (
            each if np.ndim(each) else lax.broadcast_in_dim(each, shape, ()) for each in arrays[1:]
        )
        arrays = [arrays[0], *cases]
    (result,) = again(equation, arrays)
    return [LazyBroadcast(Laid(result, inner), equation.outvars[0].aval.shape, x.axes)]


_ELEMENTWISE = """
abs add and acos acosh asin asinh atan atan2 atanh cbrt ceil clamp clz convert_element_type copy
cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma
log log1p logistic lt max min mul ne neg not or population_count pow rem round rsqrt select_n
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor reduce_precision optimization_barrier round_inputs
"""
rule(*_ELEMENTWISE.split())(elementwise)


@rule("round_rows")
def round_rows(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    axes = tuple(sorted(x.position(axis % x.rank) - x.rank for axis in equation.params["axes"]))
    return [Laid(again(equation, [x.lying(x.order)], axes=axes)[0], x.order)]


@rule("composite")
def composite(equation: Equation, operands: Operands) -> Results:
    name, params = kept.operation(equation)
    (x, *_) = operands
    if name == "mean":
        if params["keepdims"]:
            axes = tuple(sorted(x.position(axis) for axis in params["axes"]))
            array = kept.call(name, x.lying(x.order), axes=axes, keepdims=True)
            return [Laid(array, x.order)]
        return _reduced(
            x, params["axes"], lambda y, at: kept.call(name, y, axes=at, keepdims=False)
        )
    if name in ("softmax", "log_softmax") and x.order[-1] == params["axis"]:
        return [Laid(kept.call(name, x.lying(x.order), axis=x.rank - 1), x.order)]
    if name not in kept.ELEMENTWISE:
        return None
    if isinstance(x, LazyBroadcast):
        array = kept.call(name, x.source.lying(x.source.order), **params)
        return [LazyBroadcast(Laid(array, x.source.order), x.shape, x.axes)]
    return [Laid(kept.call(name, x.lying(x.order), **params), x.order)]


@rule(*"reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
def reduce(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    return _reduced(x, equation.params["axes"], lambda y, axes: again(equation, [y], axes=axes)[0])


def _reduced(x: Laid, axes: Sequence[int], reduce: Callable[[Any, Any], Any]) -> Results:
    left = [axis for axis in x.order if axis not in axes]
    order = tuple(sorted(left).index(axis) for axis in left)
    positions = tuple(sorted(x.position(axis) for axis in axes))
    return [Laid(reduce(x.lying(x.order), positions), order)]


@rule("concatenate")
def concatenate(equation: Equation, operands: Operands) -> Results:
    order = _common(operands)
    at = order.index(equation.params["dimension"])
    (joined,) = again(equation, [each.lying(order) for each in operands], dimension=at)
    return [Laid(joined, order)]


#: Parameters with an entry for each axis.
_WINDOWS = "window_dimensions window_strides padding base_dilation window_dilation"
_BY_AXIS = {
    "pad": "padding_config",
    "slice": "start_indices limit_indices strides",
    **{f"reduce_window_{how}": _WINDOWS for how in ("sum", "max", "min")},
}


@rule(*_BY_AXIS)
def by_axis(equation: Equation, operands: Operands) -> Results:
    x, *numbers = operands
    moved = {}
    for name in _BY_AXIS[equation.primitive.name].split():
        values = equation.params[name]
        moved[name] = None if values is None else tuple(values[axis] for axis in x.order)
    (result,) = again(equation, [x.lying(x.order), *map(array_of, numbers)], **moved)
    return [Laid(result, x.order)]


@rule("rev")
def rev(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    positions = tuple(x.position(axis) for axis in equation.params["dimensions"])
    return [Laid(again(equation, [x.lying(x.order)], dimensions=positions)[0], x.order)]


@rule("split")
def split(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    parts = again(equation, [x.lying(x.order)], axis=x.position(equation.params["axis"]))
    return [Laid(each, x.order) for each in parts]


@rule("squeeze")
def squeeze(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    return [_without(x, [axis % x.rank for axis in equation.params["dimensions"]])]


def _without(x: Laid, gone: Sequence[int]) -> Laid:
    left = [axis for axis in x.order if axis not in gone]
    order = tuple(sorted(left).index(axis) for axis in left)
    array = x.lying(x.order)
    return Laid(lax.squeeze(array, [x.position(axis) for axis in gone]), order) if gone else x


@rule("reshape")
def reshape(equation: Equation, operands: Operands) -> Results:
    """Reshapes that only add or remove axes of size 1, or split and join adjacent axes."""
    (x, *sizes) = operands
    if sizes or equation.params["dimensions"] is not None or x.is_plain:
        return None
    old, new = x.shape, tuple(equation.params["new_sizes"])
    if _wide(old) == _wide(new):
        thin = _without(x, [axis for axis, size in enumerate(old) if same_size(size, 1)])
        larger = [axis for axis, size in enumerate(new) if not same_size(size, 1)]
        if len(larger) == len(new):
            return [thin]
        return [LazyBroadcast(thin, new, larger)]
    return _regrouped(x, old, new)


def _regrouped(x: Laid, old: Sequence[Any], new: Sequence[Any]) -> Results:
    groups = _groups(old, new)
    if groups is None:
        return None
    found: list[tuple[int, list[int]]] = []
    for before, after in groups:
        positions = [x.position(axis) for axis in before]
        if positions != list(range(positions[0], positions[0] + len(positions))):
            return None  # the joined axes are not adjacent
        found.append((positions[0], after))
    order = tuple(axis for _, after in sorted(found) for axis in after)
    reshaped = lax.reshape(x.lying(x.order), tuple(new[axis] for axis in order))
    return [Laid(reshaped, order)]


def _groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Axes of a shape, and those of the other with as many elements; None if unknown."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        if i == len(old) or j == len(new):
            return None
        before, after = [i], [j]
        i, j = i + 1, j + 1
        while not same_size(_product(old, before), _product(new, after)):
            left, right = _product(old, before), _product(new, after)
            if not (isinstance(left, int) and isinstance(right, int)):
                return None
            if left < right and i < len(old):
                before.append(i)
                i += 1
            elif left > right and j < len(new):
                after.append(j)
                j += 1
            else:
                return None
        groups.append((before, after))
    return groups


def _product(sizes: Sequence[Any], axes: Sequence[int]) -> Any:
    return math.prod(sizes[axis] for axis in axes)


def _wide(shape: Sequence[Any]) -> list[str]:
    return [str(size) for size in shape if not same_size(size, 1)]
