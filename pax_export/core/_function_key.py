"""Equality of functions: the same code with equal closures.

A function that closes over plain values is identified by them, so that two models built
by one recipe need one trace.  One that may hold state is identified by identity: two of
them may part later.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})
_STORES = ("STORE_DEREF", "DELETE_DEREF")


def function_key(
    function: types.FunctionType, key_of: Callable, may_change: Callable[[Any], bool]
) -> Any:
    """The key of a function; `key_of` gives that of a value, `may_change` says what is no value."""
    values = _closed_over(function)
    defaults = (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
    if values is None or function.__dict__ or may_change(defaults):
        return types.FunctionType, function
    return (
        types.FunctionType,
        function.__code__,
        function.__name__,
        function.__qualname__,
        id(function.__globals__),
        key_of(defaults),
        key_of(values),
    )


def _closed_over(function: types.FunctionType) -> tuple | None:
    """The values of the variables that a function closes over; None if these may change."""
    if not function.__closure__:
        return ()
    try:
        values = tuple([cell.cell_contents for cell in function.__closure__])
    except ValueError:  # a variable that has no value yet
        return None
    if not all(type(value) in _PLAIN for value in values):
        return None
    code = function.__code__
    set_by_it = _assigned_in(code)
    set_beside_it = _assigned_beside(code, _outermost(function))
    if set_beside_it is None or not (set_by_it | set_beside_it).isdisjoint(code.co_freevars):
        return None
    return values


@functools.lru_cache(maxsize=4096)
def _assigned_in(code: types.CodeType) -> frozenset[str]:
    """The variables that code, or a function in it, closes over and assigns to."""
    found = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in _STORES and each.argval in code.co_freevars
    }
    for inner in _functions_in(code):
        found |= _assigned_in(inner) & set(code.co_freevars + code.co_cellvars)
    return frozenset(found)


def _functions_in(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


@functools.lru_cache(maxsize=4096)
def _assigned_beside(
    code: types.CodeType, outermost: types.CodeType | None
) -> frozenset[str] | None:
    """What any function assigns to among those that were made around this one.

    None if the code is not found: its variables may then be shared with other functions.
    """
    around = None if outermost is None else _way_to(code, outermost)
    if around is None:
        return None
    beside = [inner for outer in around for inner in _functions_in(outer)]
    return frozenset().union(*map(_assigned_in, beside))


def _way_to(code: types.CodeType, outer: types.CodeType) -> list[types.CodeType] | None:
    """The enclosing functions of this code, from the outermost to the innermost."""
    inside = _functions_in(outer)
    if any(inner is code for inner in inside):
        return [outer]
    for inner in inside:
        way = _way_to(code, inner)
        if way is not None:
            return [outer, *way]
    return None


def _outermost(function: types.FunctionType) -> types.CodeType | None:
    """The code of the function or method of a module in which this function was made."""
    first, *names = function.__qualname__.split(".<locals>")[0].split(".")
    found = function.__globals__.get(first)
    for name in names:
        found = inspect.getattr_static(found, name, None)
    if isinstance(found, property):
        found = found.fget
    for _ in range(100):  # a decorator may lead in a circle
        inner = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None)
        if inner is None:
            break
        found = inner
    return getattr(found, "__code__", None)
