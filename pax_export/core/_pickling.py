"""Pickling modules, and what pickle does not find: by another name, or as a call.

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
from dataclasses import dataclass
from typing import Any

from pax_export.core._mutable import begin, refresh
from pax_export.core._tree import ARRAYS, STATIC, update_moduledef

_PUBLIC = ("jax.nn", "jax.numpy", "jax.lax", "jax.scipy.special", "jax.random", "jax")
# What pickle finds by name itself, or refuses with a good message.
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class _Named:
    """Pickles as a name and is the function again when loaded."""

    def __init__(self, module: str, name: str):
        self.module = module
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _find(self.module, self.name)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _find, (self.module, self.name)


class _Made:
    """Pickles as a call and is what the call returns when loaded."""

    def __init__(self, reduced: tuple):
        self.reduced = reduced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, call = self.reduced
        return function(*call)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return self.reduced


def reduced_call(value: Any) -> tuple | None:
    """How to pickle a class or function that a call made; None for any other."""
    call = call_that_made(value)
    if call is None:
        return None
    args, kwargs = picklable(call.args), picklable(dict(call.kwargs))
    return repeat_call, (call.module, call.name, args, kwargs)


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def picklable(value: Any) -> Any:
    """The same value with what pickle does not find, in containers too, replaced."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([picklable(x) for x in value])
    if kind is dict:
        return {key: picklable(x) for key, x in value.items()}
    if kind is functools.partial:
        return functools.partial(picklable(value.func), *value.args, **value.keywords)
    if callable(value) and not isinstance(value, type):
        return _by_public_name(value)
    return value


def _by_public_name(function: Any) -> Any:
    if isinstance(function, types.FunctionType):
        made = reduced_call(function)
        return function if made is None else _Made(made)
    name = getattr(function, "__name__", None)
    if isinstance(function, _PLAIN) or not isinstance(name, str):
        return function
    for module in _PUBLIC:
        if getattr(importlib.import_module(module), name, None) is function:
            return _Named(module, name)
    return function


# --- classes and functions that a call made --------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a function that can be imported.

    Attributes:
        module: the module of the function.
        name: its name there.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    module: str
    name: str
    args: tuple
    kwargs: Mapping[str, Any]


_calls: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()


def remember_call(value: Any, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Notes that a class or function is what a call of ``function`` returned."""
    _calls[value] = Call(function.__module__, function.__name__, args, dict(kwargs))


def call_that_made(value: Any) -> Call | None:
    """The call that returned this class or function, if it was noted."""
    return _calls.get(value)


def repeat_call(module: str, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """What a pickle runs: the call again."""
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


# --- modules ----------------------------------------------------------------------------


def restore(cls: type, names: tuple[str, ...], attributes: dict[str, Any]) -> Any:
    """Makes a module from what a pickle holds.

    Args:
        cls: its class.
        names: the attributes that are subtrees.
        attributes: all attributes in order of assignment.
    """
    node = object.__new__(cls)
    begin(node, attributes)
    update_moduledef(node, {n: ARRAYS if n in names else STATIC for n in attributes})
    refresh(node)
    return node
