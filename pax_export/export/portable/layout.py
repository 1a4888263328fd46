"""Chooses the runtime's layout for convolutions and pools, and cancels transposes.

ONNX convolves ``[batch, features, height, width]`` and TFLite ``[batch, height, width, features]``;
a model may have the other. Here a value may have another order of axes than in the program: a
convolution returns the runtime's order, elementwise operations keep the order, and others permute
their axes. Operations without a rule get the program's order, by one transpose. In programs whose
convolutions have the runtime's layout, only transposes around batched products, as of attention,
are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from pax_export._foundations.jaxpr import bind_equation, is_literal, needed_equations
from pax_export.export.portable.program import PortableProgram, again

Order = tuple[int, ...]
_CONV = "conv_general_dilated"


class Laid:
    """An array in some order of axes; `order[i]` is the program's axis at position i."""

    def __init__(self, array: Any, order: Order):
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

    def place(self, axis: int) -> int:
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
            places = {axis: i for i, axis in enumerate(order)}
            # The axes of the smaller array in their future order.
            inner = tuple(sorted(range(len(self.axes)), key=lambda i: places[self.axes[i]]))
            to = tuple(places[self.axes[i]] for i in inner)
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
    convolutions = (each for each in equations if each.primitive.name == _CONV)
    moves_all = any(_is_laid_otherwise(each, features_first) for each in convolutions)
    moved = set() if moves_all else _around_products(equations)
    if not moved and not moves_all:
        return program

    def operate(equation: Any, operands: list[Any]) -> Sequence[Any]:
        given = [_laid(each) for each in operands]
        name = equation.primitive.name
        is_moved = moves_all or (
            name != _CONV
            and (
                name == "broadcast_in_dim"
                or not moved.isdisjoint(equation.outvars)
                or any(isinstance(x, LazyBroadcast) or not x.is_plain for x in given)
            )
        )
        made = None
        if is_moved and name == _CONV:
            made = _convolved(equation, given, features_first)
        elif is_moved and name in RULES:
            made = RULES[name](equation, given)
        if made is None:
            made = bind_equation(equation, [array_of(each) for each in given])
        return [_laid(each) for each in made]

    return program.rebuilt(operate, _laid, array_of)


def _is_laid_otherwise(equation: Any, features_first: bool) -> bool:
    x, _, result = _layouts(equation, features_first)
    return (x, result) != (plain(len(x)), plain(len(x)))


def _layouts(equation: Any, features_first: bool) -> tuple[Order, Order, Order]:
    """Returns the program's axes of images, kernel and result in the order of a runtime."""
    numbers = equation.params["dimension_numbers"]
    if features_first:
        return tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)
    (batch, features, *space), (out, *kernel) = numbers.lhs_spec, numbers.rhs_spec
    result, channels, *places = numbers.out_spec
    return (batch, *space, features), (*kernel[1:], kernel[0], out), (result, *places, channels)


def _convolved(equation: Any, operands: Sequence[Laid], features_first: bool) -> Sequence[Laid]:
    (x, kernel), orders = operands, _layouts(equation, features_first)
    first, last = plain(x.rank), (0, x.rank - 1, *range(1, x.rank - 1))
    made = again(
        equation,
        [x.lying(orders[0]), kernel.lying(orders[1])],
        dimension_numbers=lax.ConvDimensionNumbers(first, first, first)
        if features_first
        else lax.ConvDimensionNumbers(last, (x.rank - 1, x.rank - 2, *range(x.rank - 2)), last),
    )
    return [Laid(made[0], orders[2])]


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


def is_batched_product(equation: Any) -> bool:
    """Returns whether an equation is a product of matrices of a batch."""
    numbers = equation.params.get("dimension_numbers")
    return equation.primitive.name == "dot_general" and bool(numbers[1][0])


def _laid(value: Any) -> Laid:
    return value if isinstance(value, Laid) else Laid(value, plain(getattr(value, "ndim", 0)))


def array_of(value: Any) -> Any:
    return value.lying(plain(value.rank)) if isinstance(value, Laid) else value
