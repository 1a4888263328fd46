"""cond and switch: one of several functions of modules is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from pax_export._foundations.errors import InvalidArgumentError, StructureMismatchError
from pax_export._foundations.types import ArrayLike
from pax_export.core import Module, is_node, modules_and_leaves
from pax_export.transforms._checks import tree_differences
from pax_export.transforms._lift import (
    LiftedCall,
    Result,
    WrittenBack,
    have_overlap,
    parts_of,
    require_array_arguments,
    require_array_results,
    unbind,
    write_back,
)

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def cond(
    pred: ArrayLike,
    true_fun: Callable[[*Ts], R],
    false_fun: Callable[[*Ts], R],
    *operands: *Ts,
) -> R:
    """Calls one of two functions of modules: `jax.lax.cond` with state.

    A branch may change the modules that it takes, and an open module or a method of one may be a
    branch itself. In both branches the results and the changed modules have the same structure.
    The keys of a module advance as far as the chosen branch draws from them.

    Args:
        pred: a boolean scalar.
        true_fun: called with the operands if ``pred`` is True.
        false_fun: called with the operands otherwise.
        *operands: arrays, modules and trees of these.

    Returns:
        The result of the chosen function.

    Raises:
        StructureMismatchError: (a ValueError) the branches return, or leave in a module, different
            structures, shapes or dtypes.
        InvalidArgumentTypeError: (a TypeError) an operand or a result is not an array.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> class Gate(pax.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm = pax.BatchNorm1D(2)
        ...     def __call__(self, x):
        ...         return T.cond(x.mean() > 0, self.norm, lambda x: x, x)
        >>> gate, y = Gate() % jnp.array([[1.0, 2.0], [3.0, 6.0]])
        >>> y.round(2).tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
    """
    named = {"true_fun": true_fun, "false_fun": false_fun}
    return _call_one("cond", named, operands, lambda both, x: jax.lax.cond(pred, *both, x))


def switch(index: ArrayLike, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts) -> R:
    """Calls one of several functions of modules: `jax.lax.switch` with state.

    Branches are those of `cond`.

    Args:
        index: an integer scalar, clamped to the number of branches.
        branches: the functions, at least one.
        *operands: arrays, modules and trees of these.

    Returns:
        The result of the chosen function.

    Raises:
        StructureMismatchError: (a ValueError) the branches return, or leave in a module, different
            structures, shapes or dtypes.
        InvalidArgumentTypeError: (a TypeError) an operand or a result is not an array.
        InvalidArgumentError: (a ValueError) there are no branches.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> experts = [pax.Linear(2, 3) for _ in range(4)]
        >>> T.switch(2, experts, jnp.ones((1, 2))).shape
        (1, 3)
    """
    named = {f"branches[{i}]": function for i, function in enumerate(branches)}
    if not named:
        raise InvalidArgumentError("switch needs at least one branch.", where="switch.branches")
    return _call_one("switch", named, operands, lambda all_, x: jax.lax.switch(index, all_, x))


def _call_one(
    transform: str,
    named: Mapping[str, Callable],
    operands: tuple,
    choose: Callable[[list[Callable], dict[int, Any]], Any],
) -> Any:
    """Calls the branch that jax chooses, with the same arguments as each other one."""
    branches = _Branches(transform, named, operands)
    return branches.finish(choose(branches.functions, branches.leaves))


class _Branches:
    """One call of `cond` or `switch`: the same arguments for each function."""

    def __init__(self, transform: str, named: Mapping[str, Callable], operands: tuple):
        functions, owners = unbind(named.values())
        # All branches return all open modules, so that they return one structure.
        calls = [LiftedCall(f, (*operands, owners), {}, overlap=False) for f in functions]
        self.transform, self.call = transform, calls[0]
        require_array_arguments(self.call.parts, transform, "a closure of the branches for it")
        self.leaves = dict(enumerate(self.call.leaves))
        self.results: dict[str, Result] = {}
        self.functions = [self._traced(name, call) for name, call in zip(named, calls)]

    def _traced(self, name: str, call: LiftedCall) -> Callable:
        def branch(leaves: dict[int, Any]) -> list[Any]:
            result = call.inside(leaves, lambda value: (value, None))
            require_array_results(parts_of((result.head,)), self.transform)
            self._check(name, result)
            self.results[name] = result
            return [*tree_leaves(result.head), *result.leaves]

        return branch

    def _check(self, name: str, result: Result) -> None:
        """Raises unless a branch returns, and leaves in modules, what the first one does."""
        if not self.results:
            return
        first_name, first = next(iter(self.results.items()))
        lines, what = tree_differences(first.head, result.head, "the result"), "return"
        for old, new, is_open in zip(first.copies, result.copies, self.call.written):
            if is_open and not lines:
                name_of = type(old).__name__
                lines = [f"{name_of}.{line}" for line in tree_differences(old, new, name_of)]
                what = "leave in a module"
        if lines:
            raise StructureMismatchError(
                f"{self.transform}: the branches {what} different structures.",
                where=f"{first_name} and {name}",
                got="; ".join(lines[:3]),
                write="the same classes, shapes and dtypes in all branches",
            )

    def finish(self, leaves: Sequence[Any]) -> Any:
        """The result of the call; modules that are open here are updated in place."""
        results = list(self.results.values())
        head = tree_structure(results[0].head)
        items, treedef = tree_flatten(head.unflatten(leaves[: head.num_leaves]), is_leaf=is_node)
        places = zip(*[result.head_places for result in results])
        for i in [i for i, item in enumerate(items) if is_node(item)]:
            origin, *others = next(places)
            if origin is not None and all(other == origin for other in others):
                items[i] = WrittenBack(origin)
        finals = self._finals(results, leaves[head.num_leaves :])
        origins = [
            _common_origins([result.origins[i] for result in results], self.call.roots[number])
            for i, number in enumerate(n for n, is_open in enumerate(self.call.written) if is_open)
            if number in finals
        ]
        return write_back(
            self.call.roots, treedef.unflatten(items), finals.values(), tuple(origins)
        )

    def _finals(self, results: list[Result], leaves: Sequence[Any]) -> dict[int, Any]:
        """The changed modules by their numbers; leaves that no branch touched are the caller's."""
        untouched = [
            numbers[0] if len(set(numbers)) == 1 else None
            for numbers in zip(*[result.untouched for result in results])
        ]
        before = self.call.leaves
        merged = [x if n is None else before[n] for x, n in zip(leaves, untouched)]
        _, finals = results[0].treedef.unflatten(merged)
        if not have_overlap(self.call.roots, self.call.written):
            return finals
        # An unchanged copy must not undo the changes of another one.
        return {n: final for n, final in finals.items() if self.call.is_changed(n, final, before)}


def _common_origins(origins: list[tuple], root: Module) -> tuple:
    """Which modules those of a result are: where branches differ, those at the same places."""
    first = origins[0]
    if all(each == first for each in origins):
        return first
    count = len(modules_and_leaves(root)[0])
    alike = len(first) == count
    return tuple([first[0] + i if alike or i == 0 else None for i in range(len(first))])
