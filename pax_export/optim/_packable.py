"""Checks that an optimizer computes the same on concatenated arrays.

Each number of an update may depend only on the same number of gradients, parameters and moments, by
one rule per dtype, and on scalars. The programs for separate and packed parameters are evaluated
with *formulas* instead of arrays and compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from pax_export._errors import UnsupportedOperationError
from pax_export._jax import is_tracer
from pax_export._jaxpr import called_program, interpret
from pax_export._types import PyTree, TreeDef
from pax_export.optim._packing import Packing
from pax_export.optim._transformation_key import KeyedTransformation

#: Operations that treat each number by itself.
_BY_NUMBER = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy "
    "cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow "
    "is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pow real "
    "reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor".split()
)


@dataclass(frozen=True)
class _Formula:
    """The computation of a value."""

    number: int  # the number of the formula; equal formulas have equal numbers
    shape: tuple[int, ...]  # of the value
    leaf: int | None = None  # the parameter to which the numbers of this array belong
    is_uniform: bool = False  # whether it is an array with one number everywhere
    # For a sum over whole arrays: their leaves, and the numbers of their formulas.
    summed: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_foreign(self) -> bool:
        """True for an array that belongs to no parameter."""
        return self.leaf is None and self.shape != () and not self.is_uniform


class _Unpackable(Exception):
    """An operation that requires separate arrays: its description, and a leaf if known."""

    def __init__(self, reason: str, leaf: int | None = None):
        super().__init__(reason)
        self.leaf = leaf


def require_packable(recipe: KeyedTransformation, params: PyTree) -> None:
    """Raises unless an optimizer, packed for these parameters, computes the same."""
    leaves, treedef = tree_flatten(params)
    shapes = tuple([jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves])
    found = _find_obstacle(recipe, Packing.of(params), treedef, shapes) if leaves else None
    if found is not None:
        raise UnsupportedOperationError(
            "packed=True needs an elementwise optimizer with one rule for all parameters of a "
            "dtype, such as adam, adamw, sgd, lion and rmsprop, alone or after "
            "clip_by_global_norm.",
            where=found[0] or None,
            got=found[1],
            write="from_optax(transformation), without packed",
        )


@functools.lru_cache(maxsize=64)
def _find_obstacle(
    recipe: KeyedTransformation, packing: Packing, treedef: TreeDef, shapes: tuple
) -> tuple[str, str] | None:
    """Returns where and why an optimizer cannot be packed, or None."""
    if recipe.takes_slow:
        return "", "optax.lookahead, which keeps parameters of its own"
    plain = treedef.unflatten(shapes)
    packed = jax.eval_shape(packing.pack, plain)
    try:
        _compare_programs(recipe, packing, plain, packed)
    except _Unpackable as obstacle:
        where = "" if obstacle.leaf is None else packing.entries[obstacle.leaf].name
        return where, str(obstacle)
    return None


def _compare_programs(
    recipe: KeyedTransformation, packing: Packing, plain: object, packed: object
) -> None:
    """Raises unless the programs for plain and packed parameters are equal."""
    numbers: dict[Any, int] = {}
    dtypes = [entry.dtype for entry in packing.entries]
    sides = (
        _OptimizerReader(numbers, plain, dtypes),
        _OptimizerReader(numbers, packed, list(packing.dtypes)),
    )
    for made in zip(*[side.programs(recipe) for side in sides]):
        (outer, items), (packed_outer, packed_items) = made
        if outer != packed_outer:
            raise _Unpackable("a state of another structure, as masks and labels make it")
        for item, other in zip(items, packed_items):
            _require_alike(item, other, dtypes, packing.dtypes)


def _require_alike(
    item: PyTree, other: PyTree, dtypes: Sequence[str], packed_dtypes: Sequence[str]
) -> None:
    """Raises unless one result, for all parameters or a scalar, is the same when packed."""
    if isinstance(item, _Formula):
        if not isinstance(other, _Formula) or item.number != other.number:
            raise _Unpackable("a number in the state that depends on how the arrays are divided")
        return
    for leaf, formula in enumerate(item):
        if formula.leaf not in (None, leaf) or formula.is_foreign:
            raise _Unpackable("a result that is made of other arrays", leaf)
        if formula.number != other[packed_dtypes.index(dtypes[leaf])].number:
            raise _Unpackable("a rule that does not hold for all (a mask? labels?)", leaf)


class _OptimizerReader:
    """Evaluates an optimizer on shapes and dtypes; numbers formulas across programs."""

    def __init__(self, numbers: dict[Any, int], params: PyTree, dtypes: list[str]):
        self.numbers, self.params, self.dtypes = numbers, params, dtypes
        self.treedef = tree_structure(params)
        self.zeros: set[int] = set()

    def programs(self, recipe: KeyedTransformation) -> Iterator[tuple[Any, list[Any]]]:
        """Yields the initial state, then updates and next state, with their formulas."""
        state = jax.eval_shape(recipe.init, self.params)
        state = tree_map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), state)
        yield self._read(recipe.init, param=self.params)
        yield self._read(recipe.update, grad=self.params, state=state, param=self.params)

    def _read(self, function: Callable, **arguments: object) -> tuple[Any, list[Any]]:
        given = [f for name, tree in arguments.items() for f in self._inputs(name, tree)]
        try:
            program, made = jax.make_jaxpr(function, return_shape=True)(*arguments.values())
        except (TypeError, ValueError) as error:
            raise _Unpackable(f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error
        results = interpret(program, given, self._operate, constant=self._constant)
        results = [self._whole(x) for x in results]
        items, outer = self._places(made)
        left = iter(results)
        return outer, [
            [next(left) for _ in range(len(self.dtypes))] if self._is_like_params(x) else next(left)
            for x in items
        ]

    def _is_like_params(self, tree: PyTree) -> bool:
        return tree_structure(tree) == self.treedef

    def _places(self, tree: PyTree) -> tuple[list[Any], Any]:
        return tree_flatten(tree, is_leaf=self._is_like_params)

    def _inputs(self, name: str, tree: PyTree) -> Iterator[_Formula]:
        for place, item in enumerate(self._places(tree)[0]):
            if not self._is_like_params(item):
                yield self._formula((name, place), item.shape)
                continue
            for leaf, value in enumerate(tree_leaves(item)):
                yield self._formula((name, place, self.dtypes[leaf]), value.shape, leaf)

    def _formula(
        self, key: object, shape: PyTree, leaf: int | None = None, **more: PyTree
    ) -> _Formula:
        number = self.numbers.setdefault(key, len(self.numbers))
        return _Formula(number, tuple(shape), leaf, **more)

    def _constant(self, value: PyTree) -> _Formula:
        if is_tracer(value):
            return self._formula(("traced", id(value)), value.shape)
        array = np.asarray(value)
        formula = self._formula((array.dtype.name, array.shape, array.tobytes()), array.shape)
        if not array.shape and not array:
            self.zeros.add(formula.number)
        return formula

    def _operate(self, equation: Any, given: list[_Formula]) -> list[_Formula] | None:
        """The formulas of the results of an operation."""
        if called_program(equation) is not None:
            return None
        name, params = equation.primitive.name, equation.params
        shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
        if name == "add" and any(x.summed for x in given):
            added = self._add_sums(*given)
            if added is not None:
                return [added]
        leaf = given[0].leaf if name == "reduce_sum" and shapes == [()] else None
        if leaf is not None:
            return [_Formula(-1, (), summed=frozenset([(leaf, given[0].number)]))]
        if name == "convert_element_type" and self._is_partial(given[0]):
            return [self._converted(given[0], params)]
        given = [self._whole(x) for x in given]
        leaves = {x.leaf for x in given} - {None}
        if leaves:
            return [self._of_leaf(name, given, params, leaves)]
        numbers = tuple([x.number for x in given])
        key = (name, _format_program(params), numbers)
        if name == "broadcast_in_dim" and given[0].shape == ():
            return [_Formula(numbers[0], shapes[0], is_uniform=True)]
        if name in _BY_NUMBER and not any(x.is_foreign for x in given):
            return [self._formula(key, shapes[0], is_uniform=True)]
        return [self._formula((*key, at), shape) for at, shape in enumerate(shapes)]

    def _of_leaf(
        self, name: str, given: list[_Formula], params: Mapping[str, Any], leaves: set
    ) -> _Formula:
        """The result of an operation on an array of a parameter."""
        leaf = min(leaves)
        if len(leaves) > 1:
            raise _Unpackable(f"{name} of several arrays", leaf)
        if name not in _BY_NUMBER:
            raise _Unpackable(f"{name}, which looks at an array as a whole", leaf)
        if any(x.is_foreign for x in given):
            raise _Unpackable(
                f"{name} with an array that is no gradient, parameter or moment "
                "(random numbers? one factor for each weight?)",
                leaf,
            )
        shape = next(x.shape for x in given if x.leaf == leaf)
        numbers = tuple([x.number for x in given])
        return self._formula((name, _format_program(params), numbers), shape, leaf)

    def _add_sums(self, a: _Formula, b: _Formula) -> _Formula | None:
        """Adds two sums over arrays; returns None if they are not such sums."""
        if a.summed and b.summed and not a.summed & b.summed:
            return replace(a, summed=a.summed | b.summed)
        if a.number in self.zeros or b.number in self.zeros:
            return a if a.summed else b
        return None

    def _is_partial(self, formula: _Formula) -> bool:
        return bool(formula.summed) and len(formula.summed) != len(self.dtypes)

    def _converted(self, formula: _Formula, params: Mapping[str, Any]) -> _Formula:
        """Converts a sum over the arrays of one dtype to another dtype."""
        parts = [
            (leaf, self._formula(("converted", _format_program(params), number), ()).number)
            for leaf, number in formula.summed
        ]
        return replace(formula, summed=frozenset(parts))

    def _whole(self, formula: _Formula) -> _Formula:
        """A sum over arrays as a scalar, which it is if it has all arrays."""
        if not formula.summed:
            return formula
        rules = {(self.dtypes[leaf], number) for leaf, number in formula.summed}
        leaves = sorted(leaf for leaf, _ in formula.summed)
        if leaves != list(range(len(self.dtypes))) or len(rules) != len(set(self.dtypes)):
            raise _Unpackable("reduce_sum over some arrays, not over all together", leaves[0])
        return self._formula(("sum", tuple(sorted(rules))), ())


def _format_program(params: Mapping[str, Any]) -> str:
    return repr(sorted(params.items(), key=lambda item: item[0]))
