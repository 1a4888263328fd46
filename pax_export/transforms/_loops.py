"""while_loop, fori_loop and map: loops over functions of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pax_export._foundations.errors import ImmutableModuleError
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.transforms._axes import MapOptions, inputs_of
from pax_export.transforms._lift import LiftedCall, Strict, unbind
from pax_export.transforms._scan import ScanBody, scan

T = TypeVar("T")


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
    options = MapOptions.of(
        transform, in_axes=None, in_axes_kwargs=None, out_axes=0, state_axes=None,
        split_rngs=..., transform_metadata={},
    )  # fmt: skip
    argnum = len(args) - 2  # of the carry
    inputs = inputs_of(function, args, {}, options, carried=argnum)
    return ScanBody(inputs, options, argnum, scan_output=False)
