"""Modules with replaced methods, sharing classes, because jax keeps every class that it sees.

Functions that read only their arguments are methods of one class; others are static data of the
module, and one class for all looks them up.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pax_export.core._check import refuse_hidden
from pax_export.core._static import is_self_contained
from pax_export.core._subclassing import aspect_of, derive_class, register_aspect
from pax_export.core._traversal import rebuild_tree
from pax_export.core._tree import Node, attributes_of, flatten, unflatten

M = TypeVar("M", bound=Node)
METHODS = "_replaced_methods"


class OfInstance(NamedTuple):
    """A method of a recipe that each module stores itself."""

    name: str
    bound: bool  # whether it gets the module as its first argument


class _MethodSlot:
    """A class attribute for a method that each module stores itself."""

    def __init__(self, name: str):
        self.name = name
        self.__name__ = name

    def __get__(self, module: Node | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        method = dict(attributes_of(module)[METHODS])[self.name]
        return method.__get__(module, owner) if _binds_module(method) else method

    def __call__(self, module: Node, /, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(module, type(module))(*args, **kwargs)


class _StaticMethod(staticmethod):  # type: ignore[type-arg]  # has none at run time
    """A class attribute for a callable that each module stores itself and that takes no module."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self.__wrapped__.__get__(module, owner)


def replace_method(module: M, methods: dict[str, Any]) -> M:
    """A module with the same data and other methods."""
    before: dict[str, Any] = dict(aspect_of(type(module), "methods") or ())
    own_methods = dict(attributes_of(module).get(METHODS, ()))
    for name, method in methods.items():
        own_methods.pop(name, None)
        before[name] = method
        if _is_made_anew(method):
            own_methods[name] = method
            before[name] = OfInstance(name, _binds_module(method))
    cls = derive_class(type(module), "methods", tuple(sorted(before.items())))
    children, moduledef = flatten(rebuild_tree(module))
    static = {name: value for name, value in moduledef.static.items() if name != METHODS}
    if own_methods:
        static[METHODS] = tuple(sorted(own_methods.items()))
    new = unflatten(moduledef.derived(cls, static), children)
    refuse_hidden(new)
    return new


def _binds_module(method: Callable[..., Any]) -> bool:
    """Returns whether a callable gets the module as its first argument when it is a method."""
    # New versions of Python give a partial a `__get__`, which so far only warns.
    return hasattr(method, "__get__") and not isinstance(method, functools.partial)


def _is_made_anew(method: Callable[..., Any]) -> bool:
    """Returns whether a callable may be a new object each time its line of code runs."""
    if isinstance(method, (type, property, staticmethod, classmethod)) or not callable(method):
        return False
    if isinstance(method, types.FunctionType):
        defaults = method.__defaults__ or method.__kwdefaults__
        return bool(defaults) or not is_self_contained(method)
    return not isinstance(method, types.BuiltinFunctionType)


def _replaced_methods(
    base: type, namespace: dict[Any, Any], methods: tuple[Any, ...]
) -> dict[str, Any]:
    return {name: _in_class(method) for name, method in methods}


def _in_class(method: Callable[..., Any]) -> Any:
    if not isinstance(method, OfInstance):
        return method
    return _MethodSlot(method.name) if method.bound else _StaticMethod(_MethodSlot(method.name))


register_aspect("methods", _replaced_methods)
