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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from pax_export._foundations.jaxpr import bind_equation, is_literal, needed_equations
from pax_export._foundations.types import Array, Atom, Equation
from pax_export.export.portable import kept
from pax_export.export.portable.program import PortableProgram, again
from pax_export.export.portable.sizes import same_size

Order = tuple[int, ...]
_CONV = "conv_general_dilated"
_POOLS = frozenset({"reduce_window_max", "reduce_window_sum"})


class Permuted:
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

    @property
    def array(self) -> Array:
        """The array in its own order."""
        return self.in_order(self.order)

    def positions(self, axes: Iterable[int]) -> Order:
        """Returns the positions of axes of the program."""
        return tuple(map(self.order.index, axes))

    def in_order(self, order: Order) -> Array:
        """The array in another order; transposed once for each."""
        if order not in self._arrays:
            self._arrays[order] = lax.transpose(self._arrays[self.order], self.positions(order))
        return self._arrays[order]


class LazyBroadcast(Permuted):
    """An array that a smaller one is broadcast to, in each order without a transpose."""

    def __init__(self, source: Permuted, shape: tuple[Any, ...], axes: Sequence[int]):
        self._arrays = {}
        self.order = plain(len(shape))
        self.source, self._shape, self.axes = source, shape, tuple(axes)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self._shape

    def in_order(self, order: Order) -> Array:
        if order not in self._arrays:
            positions = {axis: i for i, axis in enumerate(order)}
            # The axes of the smaller array in their future order.
            inner = tuple(sorted(range(len(self.axes)), key=lambda i: positions[self.axes[i]]))
            to = tuple(positions[self.axes[i]] for i in inner)
            shape = tuple(self._shape[axis] for axis in order)
            self._arrays[order] = lax.broadcast_in_dim(self.source.in_order(inner), shape, to)
        return self._arrays[order]


def plain(rank: int) -> Order:
    return tuple(range(rank))


Operands = Sequence[Permuted]
Results = Sequence[Permuted] | None
#: Rules that carry an order through an operation: (equation, operands) to results; None if it
#: cannot, for these operands.
Rule = Callable[[Equation, Operands], Results]
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

    def is_moved(equation: Equation, operands: Operands) -> bool:
        return (
            moves_all
            or equation.primitive.name == "broadcast_in_dim"
            or not moved.isdisjoint(equation.outvars)
            or any(isinstance(x, LazyBroadcast) or not x.is_plain for x in operands)
        )

    def by_rule(equation: Equation, operands: Operands) -> Results:
        name = equation.primitive.name
        if name == _CONV:
            return _convolved(equation, operands, features_first) if moves_all else None
        if name not in RULES or not is_moved(equation, operands):
            return None
        if name in _POOLS and not features_first and operands[0].is_plain:
            order = _pool_order(equation)
            operands = [Permuted(operands[0].in_order(order), order)]
        return RULES[name](equation, operands)

    def operate(equation: Equation, operands: list[Any]) -> Sequence[Permuted]:
        values = [_permuted(each) for each in operands]
        results = by_rule(equation, values)
        if results is not None:
            return results
        return [_permuted(each) for each in bind_equation(equation, [*map(_plain_array, values)])]

    return program.rebuilt(operate, _permuted, _plain_array)


def _is_laid_otherwise(equation: Equation, features_first: bool) -> bool:
    name = equation.primitive.name
    if features_first:
        return name == _CONV  # ONNX's biases meet their products in any net
    if name in _POOLS:
        return _pool_order(equation) != plain(equation.invars[0].aval.ndim)
    if name != _CONV:
        return False
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


def _convolved(equation: Equation, operands: Operands, features_first: bool) -> Results:
    x, kernel = operands
    of_x, of_kernel, of_result = _layouts(equation, features_first)
    first, last = plain(x.rank), (0, x.rank - 1, *range(1, x.rank - 1))
    (result,) = again(
        equation,
        [x.in_order(of_x), kernel.in_order(of_kernel)],
        dimension_numbers=lax.ConvDimensionNumbers(first, first, first)
        if features_first
        else lax.ConvDimensionNumbers(last, (x.rank - 1, x.rank - 2, *range(x.rank - 2)), last),
    )
    return [Permuted(result, of_result)]


def _around_products(equations: Sequence[Equation]) -> set[Atom]:
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


def _permuted(value: Any) -> Permuted:
    return value if isinstance(value, Permuted) else Permuted(value, plain(np.ndim(value)))


def _plain_array(value: Any) -> Any:
    return value.in_order(plain(value.rank)) if isinstance(value, Permuted) else value


# --- Layout rules: how each operation permutes its axes ---


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
    (result,) = again(
        equation,
        [one.value.array, other.value.array],
        dimension_numbers=(
            (one.value.positions(one.sums), other.value.positions(other.sums)),
            (one.value.positions(one.batch), other.value.positions(other.batch)),
        ),
    )
    free = [axes[axis] for each, axes in factors for axis in each.value.order if axis in axes]
    return [Permuted(result, (*range(count), *free))]


class _Factor:
    def __init__(self, value: Permuted, sums: Sequence[int], batch: Sequence[int]):
        self.value, self.sums, self.batch = value, sums, batch
        self.free = [axis for axis in range(value.rank) if axis not in (*sums, *batch)]

    def is_moved(self, first: bool = False) -> bool:
        """Returns whether runtimes need another order, as the first or the second operand.

        They exchange two axes of a matrix themselves.
        """
        batch, sums = self.value.positions(self.batch), self.value.positions(self.sums)
        free = sorted(self.value.positions(self.free))
        rest = [(*free, *sums), (*sums, *free)]
        orders = rest if len(free) == len(self.sums) == 1 else rest[:1] if first else rest[1:]
        return all((*batch, *each) != plain(self.value.rank) for each in orders)


@rule("transpose")
def transpose(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    permutation = equation.params["permutation"]
    if isinstance(x, LazyBroadcast):
        shape = tuple(x.shape[axis] for axis in permutation)
        return [LazyBroadcast(x.source, shape, [permutation.index(axis) for axis in x.axes])]
    return [Permuted(x.array, tuple(map(permutation.index, x.order)))]


@rule("broadcast_in_dim")
def broadcast_in_dim(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    axes = equation.params["broadcast_dimensions"]
    shape = tuple(equation.params["shape"])
    if isinstance(x, LazyBroadcast):
        return [LazyBroadcast(x.source, shape, [axes[axis] for axis in x.axes])]
    return [LazyBroadcast(x, shape, axes)]


def _common(operands: Operands) -> Order:
    """Returns the order of most operands; preferably one other than the program's."""
    orders = [each.order for each in operands if not isinstance(each, LazyBroadcast)]
    others = [order for order in orders if order != plain(len(order))]
    return max(others, key=others.count) if others else plain(operands[0].rank)


def elementwise(equation: Equation, operands: Operands) -> Results:
    rank = equation.outvars[0].aval.ndim
    whole = [each for each in operands if each.rank == rank]
    if any(each.rank not in (0, rank) for each in operands):
        return None
    lazy = [each for each in whole if isinstance(each, LazyBroadcast)]
    spread = [each for each in lazy if each.source.rank]
    # A sharding is that of the broadcast array.
    if len(lazy) == len(whole) and len(spread) == 1 and "sharding" not in equation.params:
        return _of_source(equation, operands, spread[0])
    order = _common(whole)
    if order == plain(rank):
        return None
    (result,) = again(equation, [each.in_order(order if each.rank else ()) for each in operands])
    return [Permuted(result, order)]


def _of_source(equation: Equation, operands: Operands, x: LazyBroadcast) -> Results:
    """Applies an operation on a broadcast array before the broadcast."""
    sources = [each.source if isinstance(each, LazyBroadcast) else each for each in operands]
    arrays = [each.array for each in sources]
    if equation.primitive.name == "select_n":  # whose cases have one shape
        shape = x.source.array.shape
        cases = (
            each if np.ndim(each) else lax.broadcast_in_dim(each, shape, ()) for each in arrays[1:]
        )
        arrays = [arrays[0], *cases]
    (result,) = again(equation, arrays)
    shape = equation.outvars[0].aval.shape  # where operands have sizes of 1, larger than theirs
    return [LazyBroadcast(Permuted(result, x.source.order), shape, x.axes)]


_ELEMENTWISE = """
abs add and acos acosh asin asinh atan atan2 atanh cbrt ceil clamp clz convert_element_type copy
cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma
log log1p logistic lt max min mul ne neg not or population_count pow rem round rsqrt select_n
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor reduce_precision round_inputs
"""
rule(*_ELEMENTWISE.split())(elementwise)


@rule("optimization_barrier")
def optimization_barrier(equation: Equation, operands: Operands) -> Results:
    """Each keeps its order; no runtime has barriers."""
    return operands


@rule("round_rows")
def round_rows(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    positions = x.positions(axis % x.rank for axis in equation.params["axes"])
    axes = tuple(sorted(position - x.rank for position in positions))
    (result,) = again(equation, [x.array], axes=axes)
    return [Permuted(result, x.order)]


@rule("composite")
def composite(equation: Equation, operands: Operands) -> Results:
    name, params = kept.operation(equation)
    (x, *_) = operands
    if name == "mean":
        if params["keepdims"]:
            axes = tuple(sorted(x.positions(params["axes"])))
            return [Permuted(kept.call(name, x.array, axes=axes, keepdims=True), x.order)]
        return _reduced(
            x, params["axes"], lambda y, at: kept.call(name, y, axes=at, keepdims=False)
        )
    if name in ("softmax", "log_softmax") and x.order[-1] == params["axis"]:
        return [Permuted(kept.call(name, x.array, axis=x.rank - 1), x.order)]
    if name not in kept.ELEMENTWISE:
        return None
    if isinstance(x, LazyBroadcast):
        source = Permuted(kept.call(name, x.source.array, **params), x.source.order)
        return [LazyBroadcast(source, x.shape, x.axes)]
    return [Permuted(kept.call(name, x.array, **params), x.order)]


@rule(*"reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
def reduce(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    return _reduced(x, equation.params["axes"], lambda y, axes: again(equation, [y], axes=axes)[0])


def _reduced(x: Permuted, axes: Sequence[int], reduce: Callable[[Any, Order], Any]) -> Results:
    positions = tuple(sorted(x.positions(axes)))
    return [Permuted(reduce(x.array, positions), _order_without(x, axes))]


def _order_without(x: Permuted, gone: Sequence[int]) -> Order:
    """Returns the order of the axes that are left, which the program numbers anew."""
    left = [axis for axis in x.order if axis not in gone]
    return tuple(map(sorted(left).index, left))


@rule("concatenate")
def concatenate(equation: Equation, operands: Operands) -> Results:
    order = _common(operands)
    at = order.index(equation.params["dimension"])
    (joined,) = again(equation, [each.in_order(order) for each in operands], dimension=at)
    return [Permuted(joined, order)]


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
    (result,) = again(equation, [x.array, *(each.array for each in numbers)], **moved)
    return [Permuted(result, x.order)]


@rule("rev")
def rev(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    (result,) = again(equation, [x.array], dimensions=x.positions(equation.params["dimensions"]))
    return [Permuted(result, x.order)]


@rule("split")
def split(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    parts = again(equation, [x.array], axis=x.order.index(equation.params["axis"]))
    return [Permuted(each, x.order) for each in parts]


@rule("squeeze")
def squeeze(equation: Equation, operands: Operands) -> Results:
    (x,) = operands
    return [_without(x, equation.params["dimensions"])]


def _without(x: Permuted, gone: Sequence[int]) -> Permuted:
    if not gone:
        return x
    return Permuted(lax.squeeze(x.array, x.positions(gone)), _order_without(x, gone))


@rule("reshape")
def reshape(equation: Equation, operands: Operands) -> Results:
    """Reshapes that only add or remove axes of size 1, or split and join adjacent axes."""
    (x,) = operands
    if equation.params["dimensions"] is not None or x.is_plain:
        return None
    old, new = x.shape, tuple(equation.params["new_sizes"])
    if _wide(old) == _wide(new):
        thin = _without(x, [axis for axis, size in enumerate(old) if same_size(size, 1)])
        larger = [axis for axis, size in enumerate(new) if not same_size(size, 1)]
        if len(larger) == len(new):
            return [thin]
        return [LazyBroadcast(thin, new, larger)]
    return _regrouped(x, old, new)


def _regrouped(x: Permuted, old: Sequence[Any], new: Sequence[Any]) -> Results:
    groups = _groups(old, new)
    if groups is None:
        return None
    found: list[tuple[int, list[int]]] = []
    for before, after in groups:
        positions = x.positions(before)
        if positions != tuple(range(positions[0], positions[0] + len(positions))):
            return None  # the joined axes are not adjacent
        found.append((positions[0], after))
    order = tuple(axis for _, after in sorted(found) for axis in after)
    return [Permuted(lax.reshape(x.array, tuple(new[axis] for axis in order)), order)]


def _groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]] | None:
    """Axes of a shape, and those of the other with as many elements; None if unknown."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        before, after = [i], [j]
        i, j = i + 1, j + 1
        while not same_size(left := _product(old, before), right := _product(new, after)):
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
    return groups if (i, j) == (len(old), len(new)) else None


def _product(sizes: Sequence[Any], axes: Sequence[int]) -> Any:
    return math.prod(sizes[axis] for axis in axes)


def _wide(shape: Sequence[Any]) -> list[str]:
    return [str(size) for size in shape if not same_size(size, 1)]
