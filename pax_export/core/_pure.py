"""pure, purecall, module_and_value and mutable: functions that change modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError, hide_frames
from pax_export._foundations.types import PyTree
from pax_export.core._check import check_sharing, refuse_hidden
from pax_export.core._scopes import Copies, give_back, open_modules, refresh_kinds, with_own_arrays
from pax_export.core._tree import Node, attributes_now, is_node

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Node)


def pure(func: Callable[P, T]) -> Callable[P, T]:
    """Makes a function that may change its module arguments, but only for itself.

    The arguments are copied, the copies are mutable while ``func`` runs, and the caller's objects
    do not change. jax arrays, which are immutable, are not copied; lists, dicts, sets, dataclasses
    and numpy arrays of a module are. An object of a user's own class is shared. Return the module
    to pass the changes on.

    Args:
        func: a function, a bound method, or a module with ``__call__``; for the
            last two the module is copied as well.

    Returns:
        A function with the same signature.

    Raises:
        SharedNodeError: when called, a module or an array occurs twice
            in a module, before or after the call.
        InvalidArgumentTypeError: when called, ``func`` is not callable.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> @pax.pure
        ... def without_bias(layer):
        ...     layer.bias = jnp.zeros_like(layer.bias)
        ...     return layer
        >>> layer = pax.Linear(2, 3)
        >>> float(without_bias(layer).bias.sum()), layer.bias is layer.bias
        (0.0, True)
    """

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        function, owner = _split_method(func, "pure")
        (own, named), copies = _opened_copy((owner + args, kwargs))
        with open_copies((own, named), copies):
            return function(*own, **named)

    return _wraps_function(func, wrapper)


def _wraps_function(func: Callable[..., Any], wrapper: Callable[P, T]) -> Callable[P, T]:
    try:
        return functools.wraps(func)(wrapper)
    except (AttributeError, TypeError, ValueError):
        return wrapper  # a callable without a name to copy


def _split_method(
    func: Callable[..., Any] | Node, caller: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Splits a bound method or a module into a function and the module."""
    if not callable(func):
        raise InvalidArgumentTypeError(
            f"{caller} needs something that can be called"
            + ("; the class of this module has no __call__." if is_node(func) else "."),
            got=repr(func),
            write=f"def __call__(self, x): ... in {type(func).__name__}, or one of its methods"
            if is_node(func)
            else "a function, a method of a module, or a module",
        )
    if isinstance(func, Node):
        return type(func).__call__, (func,)
    if inspect.ismethod(func) and isinstance(func.__self__, Node):
        return func.__func__, (func.__self__,)
    return func, ()


def _root_modules(tree: PyTree) -> list[Node]:
    return list(filter(is_node, jax.tree_util.tree_leaves(tree, is_leaf=is_node)))


def _opened_copy(tree: T) -> tuple[T, Copies]:
    """The same leaves in new modules and containers, but numpy arrays of modules copied."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    copy = jax.tree_util.tree_unflatten(treedef, leaves)
    if any(issubclass(cls, np.ndarray) for cls in {*map(type, leaves)}):
        for root in _root_modules(copy):
            check_sharing(root)  # two copies of one array could not be found later
        return with_own_arrays(copy)
    return copy, {}


@contextmanager
def open_copies(tree: PyTree, copies: Copies | None = None) -> Generator[None, None, None]:
    """Opens all modules of a fresh copy; checks them before and after."""
    roots = _root_modules(tree)
    modules = [module for root in roots for module in check_sharing(root)]
    try:
        with open_modules(modules):
            yield
    except Exception as error:  # of the function; raised again
        hide_frames(error)
        raise
    finally:
        if copies:
            give_back(modules, copies)
        # Attributes of a module that jax rebuilt are filled in on first access.
        touched = [module for module in modules if attributes_now(module)]
        for module in touched:
            refresh_kinds(module)
    if touched:
        for root in roots:
            check_sharing(root)
        for module in touched:
            refuse_hidden(module)


@contextmanager
def mutable(module: T) -> Generator[T, None, None]:
    """Yields a copy of a module that is mutable inside the block.

    Args:
        module: the module; it does not change.

    Yields:
        The copy.  After the block it is immutable again.

    Raises:
        SharedNodeError: at the end, a module or an array occurs twice.
        InvalidArgumentTypeError: ``module`` is not a module.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> net = pax.Linear(1, 2)
        >>> with pax.experimental.mutable(net) as net:
        ...     net.bias = jnp.array(0.0)
        >>> net.bias.item()
        0.0
    """
    require_module(module, "mutable")
    copy, copies = _opened_copy(module)
    with open_copies(copy, copies):
        yield copy


def purecall(module: M, /, *args: Any, **kwargs: Any) -> tuple[M, Any]:
    """Calls a module and returns it with the state that the call left.

    Args:
        module: a module with ``__call__``.
        *args: positional arguments of the call.
        **kwargs: keyword arguments of the call.

    Returns:
        A pair: the updated module and the output.

    Raises:
        InvalidArgumentTypeError: (an AssertionError too) not a callable module.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> norm = pax.BatchNorm1D(3)
        >>> norm, y = pax.purecall(norm, jnp.ones((4, 5, 3)))
        >>> y.shape
        (4, 5, 3)
    """
    require_module(module, "purecall")
    function, _ = _split_method(module, "purecall")
    return _call_and_return(function, module, args, kwargs)


def _call_and_return(
    function: Callable[..., T], module: M, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[M, T]:
    def call(module: M, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[M, T]:
        output = function(module, *args, **kwargs)
        return module, output

    return pure(call)(module, args, kwargs)


def module_and_value(
    module_or_function: Callable[..., Any] | Node,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a callable that returns the updated module and the value.

    Args:
        module_or_function: a module, a bound method of one, or a function whose
            first argument is a module (so it serves as a decorator of methods).

    Returns:
        For a module or a bound method, a function of the remaining arguments;
        for a function, one of the module and the remaining arguments.  Either
        returns ``(updated module, value)``.

    Raises:
        InvalidArgumentTypeError: not callable, or (when called) the first
            argument is not a module.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> dropout = pax.Dropout(0.5)
        >>> updated, y = pax.module_and_value(dropout)(jnp.ones(4))
        >>> bool((updated.rng_key == dropout.rng_key).all())
        False
    """
    function, owner = _split_method(module_or_function, "module_and_value")
    if owner:
        return functools.partial(_method_and_value, function, *owner)

    def wrapper(module: M, /, *args: Any, **kwargs: Any) -> tuple[M, Any]:
        return _method_and_value(function, module, *args, **kwargs)

    return _wraps_function(function, wrapper)


def _method_and_value(
    function: Callable[Concatenate[M, P], T], module: M, /, *args: P.args, **kwargs: P.kwargs
) -> tuple[M, T]:
    require_module(module, getattr(function, "__name__", "module_and_value"))
    return _call_and_return(function, module, args, kwargs)


def require_module(value: object, caller: str) -> None:
    """Raises unless the value is a module."""
    if not isinstance(value, Node):
        raise InvalidArgumentTypeError(
            f"{caller} needs a module as its first argument.",
            got=f"{type(value).__name__}: {value!r}"[:200],
            write="an instance of a pax_export.Module subclass",
        )
