"""cond, switch, while_loop, fori_loop and map: control flow over functions of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from pax_export._foundations.errors import (
    ImmutableModuleError,
    InvalidArgumentError,
    StructureMismatchError,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import Module, is_node, modules_and_leaves
from pax_export.transforms._axes import MapOptions, inputs_of
from pax_export.transforms._lift import (
    LiftedCall,
    Result,
    Strict,
    WrittenBack,
    have_overlap,
    parts_of,
    require_array_arguments,
    require_array_results,
    tree_differences,
    unbind,
    write_back,
)
from pax_export.transforms._scan import ScanBody, scan

R = TypeVar("R")
T = TypeVar("T")
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
    both = _Branches("cond", {"true_fun": true_fun, "false_fun": false_fun}, operands)
    return both.finish(jax.lax.cond(pred, *both.functions, both.leaves))


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
    calls = _Branches("switch", named, operands)
    return calls.finish(jax.lax.switch(index, calls.functions, calls.leaves))


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


# --- loops ------------------------------------------------------------------------------


def while_loop(cond_fun: Callable[[T], ArrayLike], body_fun: Callable[[T], T], init_val: T) -> T:
    """Calls a function of modules for as long as a condition holds: `jax.lax.while_loop`.

    The modules of the value are carried from step to step, and the body may change them; it may
    also be an open module or a method of one. The condition may only read them.

    Args:
        cond_fun: takes the value and returns a boolean scalar.
        body_fun: takes the value and returns the next one, of the same structure, shapes and
            dtypes.
        init_val: the first value: arrays, modules and trees of these.

    Returns:
        The last value.

    Raises:
        StructureMismatchError: (a ValueError) the body changes the structure, a shape or a dtype.
        ImmutableModuleError: (a ValueError) the condition changes a module.
        InvalidArgumentTypeError: (a TypeError) a function cannot be called, or a part of the
            value is not an array.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> norm, x = pax.BatchNorm1D(2), jnp.array([[1.0, 2.0], [3.0, 6.0]])
        >>> def body(value):
        ...     norm, steps = value
        ...     norm(x)
        ...     return norm, steps + 1
        >>> norm, steps = T.while_loop(lambda value: value[1] < 3, body, (norm, 0))
        >>> int(steps), norm.ema_mean.averages.round(2).tolist()
        (3, [[[2.0, 4.0]]])
    """
    (condition, body), owners = unbind([cond_fun, body_fun])
    loop = _loop_body("while_loop", body, (init_val, owners))
    asked = LiftedCall(Strict(condition), (init_val, owners), {})
    asked.written = [False] * len(asked.written)

    def holds(state: tuple) -> Any:
        (carry, threaded), _ = state
        try:
            return asked.inside(carry | threaded, lambda value: (value, None)).head
        except ImmutableModuleError as error:
            raise ImmutableModuleError(
                "while_loop: the condition cannot change a module.",
                where=error.where,
                got="a change in cond_fun, which returns a boolean alone",
                write="the change in body_fun, with what cond_fun reads as a part of the value",
            ) from None

    def step(state: tuple) -> tuple:
        state, number = state
        after, _ = loop.step(state, ({}, number))
        return after, number + 1

    (carry, threaded), _ = jax.lax.while_loop(holds, step, (loop.start(), jnp.int32(0)))
    return loop.collect_results(carry, threaded)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Calls a function of modules for each integer of a range: `jax.lax.fori_loop`.

    Modules are those of `while_loop`. As in jax, only a loop of static bounds has a gradient.

    Args:
        lower: the first integer.
        upper: the integer after the last one.
        body_fun: takes the integer and the value and returns the next value, of the same
            structure, shapes and dtypes.
        init_val: the first value: arrays, modules and trees of these.
        unroll: the number of steps to unroll, if the bounds are static.

    Returns:
        The last value.

    Raises:
        StructureMismatchError: (a ValueError) the body changes the structure, a shape or a dtype.
        InvalidArgumentTypeError: (a TypeError) a part of the value is not an array.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> layer = pax.Linear(2, 2)
        >>> T.fori_loop(0, 3, lambda i, x: layer(x) + i, jnp.ones((1, 2))).shape
        (1, 2)
    """
    (body,), owners = unbind([body_fun])
    loop = _loop_body("fori_loop", body, (lower, init_val, owners))

    def step(number: jax.Array, state: tuple) -> tuple:
        return loop.step(state, ({0: number}, number))[0]

    carry, threaded = jax.lax.fori_loop(lower, upper, step, loop.start(), unroll=unroll)
    return loop.collect_results(carry, threaded)


def map(f: Callable[[Any], T], xs: PyTree) -> T:  # as in jax.lax
    """Calls a function of modules for each index of the first axis, in order: `jax.lax.map`.

    Args:
        f: takes a slice of ``xs``. An open module, or a method of one, passes its state from call
            to call.
        xs: arrays, modules and trees of these, with one length of the first axis.

    Returns:
        The results, stacked along a new first axis.

    Raises:
        InvalidArgumentError: (a ValueError) lengths that differ, or nothing to map.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> T.map(pax.Linear(2, 3), jnp.ones((5, 1, 2))).shape
        (5, 1, 3)
    """
    (function,), owners = unbind([f])
    step = scan(lambda x, modules: (modules, function(x, modules)), carry_argnum=1)
    return step(xs, owners)[1]


def _loop_body(transform: str, function: Callable, args: tuple) -> ScanBody:
    """The body of a loop; the arguments are those of the step, then the open modules."""
    options = MapOptions(
        transform, in_axes=None, in_axes_kwargs=None, out_axes=0, state_axes=None,
        split_rngs=..., transform_metadata={},
    )  # fmt: skip
    argnum = len(args) - 2  # of the carry
    inputs = inputs_of(function, args, {}, options, carried=argnum)
    return ScanBody(inputs, options, argnum, scan_output=False)
