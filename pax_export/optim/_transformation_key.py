"""Equality of optax optimizers as static data: by code and closures, at every depth.

Python distinguishes the functions of two ``optax.adam(1e-3)``, which would retrace jitted steps.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentTypeError, NotPicklableError
from pax_export._jax import is_tracer
from pax_export._types import PyTree
from pax_export.core import is_array, is_node, static_key


class KeyedTransformation:
    """A transformation of optax, or a function that makes one; compared by content."""

    _pax_is_constant = True  # its arrays, such as a learning rate, are compared by value

    init: Callable  # makes a state from parameters
    update: Callable  # ``(grads, state, params, **extra) -> (updates, state)``
    takes: frozenset[str] | None  # the extra arguments of ``update``; None if it takes any
    takes_slow: bool  # whether it wants its parameters twice, as `optax.lookahead` does

    def __init__(self, source: PyTree):
        self._source = source
        made = source() if _is_factory(source) else source
        if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
            raise InvalidArgumentTypeError(
                "from_optax needs a gradient transformation of optax.",
                got=f"{type(made).__name__}: {made!r}"[:200],
                write="from_optax(optax.adam(1e-3))",
            )
        self.init, self.update = made.init, made.update
        self.takes = _keyword_names(made.update)
        key = _transformation_key((made.init, made.update), set())
        self.takes_slow = _mentions_name(key, _lookahead_code())
        self._key = key if source is made else _transformation_key(source, set())

    def accepted(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns the extra arguments that the transformation accepts."""
        if self.takes is None:
            return extra
        return {name: value for name, value in extra.items() if name in self.takes}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyedTransformation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __copy__(self) -> KeyedTransformation:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict) -> KeyedTransformation:
        return self

    def __reduce__(self) -> Any:
        try:
            pickle.dumps(self._source)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise NotPicklableError(
                "An optax optimizer consists of functions that pickle cannot find by name.",
                got=str(error),
                write="from_optax(functools.partial(optax.adam, 1e-3)): how to make it, "
                "which pickle can write down",
            ) from error
        return KeyedTransformation, (self._source,)


def _keyword_names(update: Callable) -> frozenset[str] | None:
    parameters = inspect.signature(update).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset([each.name for each in parameters])


def _lookahead_code() -> frozenset[types.CodeType]:
    """The code of the functions that optax.lookahead returns."""
    optax = sys.modules.get("optax")
    if optax is None:
        return frozenset()  # it created none of them
    constants = optax.lookahead.__code__.co_consts
    return frozenset([const for const in constants if isinstance(const, types.CodeType)])


def _mentions_name(key: object, codes: frozenset[types.CodeType]) -> bool:
    """True if one of these codes is part of a key, at any depth."""
    if isinstance(key, tuple):
        return any(_mentions_name(part, codes) for part in key)
    return isinstance(key, types.CodeType) and key in codes


def _is_factory(source: object) -> bool:
    return callable(source) and not hasattr(source, "update")


def _transformation_key(value: object, open_ids: set[int]) -> Any:
    """A hashable that is equal for values that compute the same."""
    if id(value) in open_ids:
        return "itself"  # a function that closes over itself
    inner = functools.partial(_transformation_key, open_ids=open_ids | {id(value)})
    if is_node(value):
        leaves, treedef = jax.tree_util.tree_flatten(value)
        return treedef, tuple(map(inner, leaves))
    if is_array(value) and not is_tracer(value):
        return _array_key(value)
    if isinstance(value, types.FunctionType) and _is_optax(value):
        cells = [_content_of(cell, inner) for cell in value.__closure__ or ()]
        defaults = inner((value.__defaults__, value.__kwdefaults__))
        return value.__code__, id(value.__globals__), defaults, tuple(cells)
    if isinstance(value, types.MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return type(value), inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(inner, value))
    if isinstance(value, dict):
        return dict, tuple([(static_key(k), inner(v)) for k, v in value.items()])
    if _is_optax(type(value)) and hasattr(value, "__dict__"):
        return type(value), inner(vars(value))
    return static_key(value)


def _content_of(cell: types.CellType, key: Callable[[Any], Any]) -> Any:
    try:
        return key(cell.cell_contents)
    except ValueError:
        return "empty"  # a variable that has no value yet


def _array_key(array: PyTree) -> Any:
    """Arrays are few and small here: a learning rate, a mask."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    return str(host.dtype), host.shape, host.tobytes()


def _is_optax(value: object) -> bool:
    return (value.__module__ or "").split(".")[0] == "optax"
