"""Pickling functions that pickle does not find: by another name, or as a call.

``jax.nn.relu`` and ``jnp.tanh`` are wrapped objects that pickle cannot find
under the module they say they come from.  Users keep them in modules all the
time, so a pickled module holds their public name instead.  For a function that a
call made (see `_made.py`) it holds the call.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

from pax_export.core._made import call_that_made, repeat_call

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
