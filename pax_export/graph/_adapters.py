"""Converts operands of ``>>`` to modules.

A function becomes a `Lambda`; a partial or bound method of a module becomes a module, so that
transforms find its arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import PyTree
from pax_export.core import Module, describe_array, is_array, is_node, summary_lines
from pax_export.nn import Lambda, function_name

T = TypeVar("T")


def identity(x: T) -> T:
    """Returns ``x`` itself."""
    return x


def as_module(function: Callable[..., Any]) -> Module:
    """The module that a node applies, from a module or anything else that can be called."""
    if not callable(function) or (isinstance(function, type) and issubclass(function, Module)):
        raise InvalidArgumentTypeError(
            "The right operand of >> must be a module or a function.",
            got=f"{type(function).__name__}: {function!r}"[:120],
            write="node >> pax.Linear(3, 3), or node >> jax.nn.relu",
        )
    owner = _owner_in_tree(function)
    if isinstance(owner, Module):
        return owner
    if type(owner) is functools.partial and _has_dynamic_parts(owner):
        return Partial(_owner_in_tree(owner.func), owner.args, owner.keywords)
    return Lambda(owner)


def _owner_in_tree(function: Callable[..., Any]) -> Any:
    """Converts a bound method of a module to a module; returns other values unchanged."""
    owner = getattr(function, "__self__", None)
    if not inspect.ismethod(function) or not isinstance(owner, Module):
        return function
    name = function.__name__
    if name == "__call__":
        return owner
    if getattr(owner, name, None) == function:
        return Method(owner, name)
    return Partial(function.__func__, (owner,), {})


def _has_dynamic_parts(function: functools.partial) -> bool:
    parts = (_owner_in_tree(function.func), function.args, function.keywords)
    leaves = jax.tree_util.tree_leaves(parts, is_leaf=is_node)
    return any(is_node(leaf) or is_array(leaf) for leaf in leaves)


class _Adapter(Module):
    """A module whose first line in a summary is ``x => f(x)``."""

    def _line(self) -> str:
        raise NotImplementedError

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns that line, and those of the modules below."""
        lines = [f"x => {self._line()}(x)", *summary_lines(self)[1:]]
        return lines if return_list else "\n".join(lines)


class Method(_Adapter):
    """A method of a module, by its name."""

    def __init__(self, module: Module, method: str):
        super().__init__()
        self.module = module
        self.method = method

    def __call__(self, *args: PyTree) -> Any:
        return getattr(self.module, self.method)(*args)

    def _line(self) -> str:
        return f"{type(self.module).__qualname__}.{self.method}"


class Partial(_Adapter):
    """A `functools.partial` whose arrays and modules are in the tree.

    Attributes:
        func: the function or module.
        args: positional arguments, then the values of keyword arguments.
        keywords: the names of the keyword arguments.
    """

    def __init__(self, func: Callable[..., Any], args: tuple, keywords: dict[str, Any]):
        super().__init__()
        self.func = func
        self.args = (*args, *keywords.values())
        self.keywords = tuple(keywords)

    def __call__(self, *args: Any) -> Any:
        own, named = self._split()
        return self.func(*own, *args, **named)

    def _split(self) -> tuple[tuple, dict[str, Any]]:
        count = len(self.args) - len(self.keywords)
        return self.args[:count], dict(zip(self.keywords, self.args[count:]))

    def _line(self) -> str:
        own, named = self._split()
        parts = [_text_of(value) for value in (self.func, *own)]
        parts += [f"{key}={_text_of(value)}" for key, value in named.items()]
        return f"functools.partial({', '.join(parts)})"


def _text_of(value: object) -> str:
    if isinstance(value, Module):
        return type(value).__qualname__
    if is_array(value):
        return describe_array(value)
    return function_name(value) if callable(value) else repr(value)


class Spread(Module):
    """Calls a module with the elements of a tuple as separate arguments; shown as that module."""

    def __init__(self, module: Module):
        super().__init__()
        self.module = module

    def __call__(self, values: tuple) -> Any:
        return self.module(*values)

    def _repr(self, info: dict[str, Any] | None = None) -> str:
        return repr(self.module)

    def summary(self, return_list: bool = False) -> str | list[str]:
        """Returns the summary of the module."""
        return self.module.summary(return_list)
