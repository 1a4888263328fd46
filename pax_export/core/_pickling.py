"""Pickles modules of derived and local classes.

``jax.nn.relu`` and ``jnp.tanh`` are wrapped objects that pickle cannot find
under the module they say they come from.  Users keep them in modules all the
time, so a pickled module holds their public name instead.  For a function that a
call made, as ``opax.adam(1e-3)`` makes classes and schedules, it holds the call.
"""

from __future__ import annotations

import functools
import importlib
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pax_export.core._containers import KEYED, READ_ONLY, copy_containers
from pax_export.core._tree import (
    ARRAYS,
    MIXED,
    STATIC,
    Node,
    attributes_now,
    kind_of,
    shows_static_leaves,
    update_moduledef,
)

# Values are of any class here, and distinguished by it: type checkers know nothing of what is in
# them.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

M = TypeVar("M", bound=Node)
_PUBLIC = ("jax.nn", "jax.numpy", "jax.lax", "jax.scipy.special", "jax.random", "jax")
# Objects that pickle finds by name itself, or refuses with a good message.
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class _Reduced:
    """Replaces a function: pickles as a call, and loads as the result of the call."""

    def __init__(self, reduced: tuple[Callable[..., Any], tuple[Any, ...]]):
        self.reduced = reduced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        find, where = self.reduced
        return find(*where)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def to_picklable(value: Any) -> Any:
    """Returns the value with picklable replacements for what pickle cannot find."""
    kind = type(value)
    if kind in READ_ONLY:
        return to_picklable(copy_containers(value))
    if kind is list or kind is tuple:
        return kind([to_picklable(x) for x in value])
    if kind is dict:
        return {key: to_picklable(x) for key, x in value.items()}
    if kind in KEYED:
        new = value.copy()  # with its default factory
        for key in new:
            new[key] = to_picklable(new[key])
        return new
    if kind is functools.partial:
        return functools.partial(to_picklable(value.func), *value.args, **value.keywords)
    if callable(value) and not isinstance(value, type):
        return _by_public_name(value)
    return value


def _by_public_name(function: Callable[..., Any]) -> Any:
    if isinstance(function, types.FunctionType):
        reduced = reduced_call(function)
        return function if reduced is None else _Reduced(reduced)
    name = getattr(function, "__name__", None)
    if isinstance(function, _PLAIN) or not isinstance(name, str):
        return function
    for module in _PUBLIC:
        if getattr(importlib.import_module(module), name, None) is function:
            return _Reduced((_find, (module, name)))
    return function


# --- classes and functions that a call made --------------------------------------------


# Created object -> module and name of the function that created it, and its arguments.
_calls: weakref.WeakKeyDictionary[Any, tuple[str, str, tuple[Any, ...], dict[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


def remember_call(
    value: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Records that a class or function is the result of a call of ``function``."""
    _calls[value] = function.__module__, function.__name__, args, dict(kwargs)


def reduced_call(value: Callable[..., Any]) -> tuple[Any, ...] | None:
    """Returns how to pickle a class or function created by a call, or None."""
    if value not in _calls:
        return None
    module, name, args, kwargs = _calls[value]
    return _repeat_call, (module, name, to_picklable(args), to_picklable(kwargs))


def _repeat_call(module: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _find(module, name)(*args, **kwargs)


# --- modules ----------------------------------------------------------------------------


def restore(cls: type[M], names: tuple[str, ...], attributes: dict[str, Any]) -> M:
    """Makes a module of the names of its subtrees and of all attributes in order."""
    node = object.__new__(cls)
    attributes_now(node).update(attributes)
    subtrees = {n: _kind_of_subtree(attributes[n]) for n in names}
    update_moduledef(node, {n: subtrees.get(n, STATIC) for n in attributes})
    return node


def _kind_of_subtree(value: object) -> str:
    return MIXED if shows_static_leaves(value) or kind_of(value) is MIXED else ARRAYS
