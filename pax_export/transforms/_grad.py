"""Gradients with respect to the parameters of modules.

One rule: an argument is split into what is differentiated (the parameters of its
modules, and all of it outside of modules) and the whole; jax differentiates a
function of the former; inside, the two are merged again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from pax_export._errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotDifferentiableError,
    UnsupportedOperationError,
)
from pax_export.core import named_leaves
from pax_export.core._check import describe_array
from pax_export.core._tree import Node, is_node


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns a loss and its gradients.

    Args:
        fun: takes a module first and returns a scalar loss, or ``(loss, aux)``.
            Inside, modules are immutable: return an updated one in ``aux``.
        argnums: which positional arguments to differentiate: an integer or
            several, negative ones counted from the end.  Argument 0 must be a
            module; others may be modules, arrays, or pytrees of both.  (True or
            False stands for ``has_aux``, PAX's second argument.)
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        holomorphic: as in `jax.grad`.
        allow_int: whether integer leaves may be differentiated; their gradients
            have the dtype float0.
        reduce_axes: must be empty; jax no longer has it.

    Returns:
        A function of the same arguments that returns ``(value, grads)`` or
        ``((value, aux), grads)``.  The gradient of a module has the structure of
        its ``parameters()``; for several argnums there is a tuple of gradients.

    Raises:
        UnsupportedOperationError: (a NotImplementedError) ``reduce_axes``.
        InvalidArgumentTypeError: (a ValueError, when called) argument 0 is to be
            differentiated and is no module.
        NotDifferentiableError: (a TypeError, when called) an integer leaf.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> def loss_fn(layer, x):
        ...     return jnp.sum(layer(x))
        >>> layer, x = pax.Linear(2, 3), jnp.ones((4, 2))
        >>> loss, grads = pax.value_and_grad(loss_fn)(layer, x)
        >>> loss.shape, grads.weight.shape
        ((), (2, 3))
    """
    if isinstance(argnums, bool):
        argnums, has_aux = 0, argnums
    if reduce_axes:
        raise UnsupportedOperationError(
            "jax has no gradients with reduce_axes any more.",
            got=f"reduce_axes={tuple(reduce_axes)!r}",
            write="jax.lax.psum of the gradients",
        )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places = _places(argnums, len(args))
        parts = tuple([_differentiable(args[i], i, allow_int or holomorphic) for i in places])

        def call(parts: tuple) -> Any:
            merged = list(args)
            for place, part in zip(places, parts):
                merged[place] = _merge(args[place], part)
            return fun(*merged, **kwargs)

        value, grads = jax.value_and_grad(
            call, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
        )(parts)
        return value, grads[0] if isinstance(argnums, int) else grads

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Makes a function that returns the gradients of a loss.

    Args:
        fun: takes a module first and returns a scalar loss, or ``(loss, aux)``.
        argnums: as in `value_and_grad`, like everything that follows.
        has_aux: whether ``fun`` returns ``(loss, aux)``.
        holomorphic: as in `jax.grad`.
        allow_int: whether integer leaves may be differentiated.
        reduce_axes: must be empty.

    Returns:
        A function of the same arguments that returns ``grads`` or
        ``(grads, aux)``.

    Raises:
        UnsupportedOperationError: (a NotImplementedError) ``reduce_axes``.
        InvalidArgumentTypeError: (a ValueError, when called) argument 0 is to be
            differentiated and is no module.
        NotDifferentiableError: (a TypeError, when called) an integer leaf.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> layer, x = pax.Linear(2, 3), jnp.ones((4, 2))
        >>> grads = pax.grad(lambda layer, x: jnp.sum(layer(x)))(layer, x)
        >>> pax.assert_structure_equal(grads, layer.parameters())
        True
    """
    if isinstance(argnums, bool):
        argnums, has_aux = 0, argnums
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, reduce_axes)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def _places(argnums: int | Sequence[int], count: int) -> list[int]:
    """Positions of the arguments to differentiate, none negative."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not -count <= number < count:
            raise InvalidArgumentError(
                "The function was called without an argument that is to be differentiated.",
                got=f"argnums={argnums} and {count} positional arguments",
                write="the argument by position, not by keyword",
            )
    return [number % count for number in numbers]


def _differentiable(argument: Any, place: int, allow_int: bool) -> Any:
    """The part of an argument that jax differentiates."""
    if place == 0 and not isinstance(argument, Node):
        raise InvalidArgumentTypeError(
            "Gradients are taken with respect to a module: the first argument must be one.",
            got=f"{type(argument).__name__}: {argument!r}"[:200],
            write="loss_fn(model, ...), or jax.grad for a function of arrays",
        )
    part = tree_map(lambda x: x.parameters() if is_node(x) else x, argument, is_leaf=is_node)
    if not allow_int:
        _require_floating(part, place)
    return part


def _require_floating(part: Any, place: int) -> None:
    if all(map(_is_floating, tree_leaves(part))):
        return
    for name, leaf in named_leaves(part):
        if not _is_floating(leaf):
            raise NotDifferentiableError(
                "A gradient needs floating-point numbers.",
                where=name or f"argument {place}",
                got=describe_array(leaf),
                write="parameters = pax.parameters_method(...) without it, or allow_int=True",
            )


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _merge(argument: Any, part: Any) -> Any:
    """An argument with the differentiated part in its place."""
    if is_node(argument):
        return argument | part
    wholes, treedef = tree_flatten(argument, is_leaf=is_node)
    pairs = zip(wholes, treedef.flatten_up_to(part))
    return treedef.unflatten([w | p if is_node(w) else p for w, p in pairs])
