"""Static values: how they are compared, copied and kept.

jax compares treedefs to decide whether to trace again. So equal models need equal static data,
even where Python distinguishes objects (two lambdas of one line), and different data must differ
even where Python calls it equal (``1`` and ``True``).
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections import deque
from typing import Any

import jax
import numpy as np

from pax_export._types import PyTree
from pax_export.core._containers import (
    KEYED,
    PARTIALS,
    copy_containers,
    has_container,
    is_container,
    is_record,
    is_small_array,
    record_of,
    without_cached,
)

_BY_VALUE = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})
_IN_ORDER = frozenset({list, tuple})


class ObjectKey:
    """A key for an object by its ``__eq__`` and its parts.

    ``Config(1) == Config(1.0)`` may hold where the programs differ, so the parts are compared
    as well, unless `_pax_equal_is_same` names the class's ``__eq__``.
    """

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectKey):
            return NotImplemented
        return self.value is other.value or _is_same_object(self.value, other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


class UnhashableKey(ObjectKey):
    """Stands in a key for an object that has ``==`` but no hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(type(self.value))


class _IdentityKey:
    """Replaces, in a key, an object that equals no other object."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_same_object(a: object, b: object) -> bool:
    """Returns whether two objects of one class compare equal and consist of the same parts."""
    if type(a) is not type(b):
        return False
    if getattr(type(a), "_pax_equal_is_same", None) is type(a).__eq__:
        return a == b
    try:
        # Containers of a user's class are compared by keys, as other containers are: two partials,
        # for example, are never equal.
        by_content = type(a).__eq__ in (dict.__eq__, list.__eq__)
        parts = _parts_by_pickle(a) if by_content or a == b else None
        return parts is not None and static_key(parts) == static_key(_parts_by_pickle(b))
    except Exception:  # whatever a third-party class raises, the objects are not equal
        return False


def _parts_by_pickle(value: object) -> Any:
    """Returns the parts of an object, as pickle takes it apart, or None if it cannot."""
    if isinstance(value, (set, frozenset)):  # their order has no meaning
        return frozenset(value), dict(getattr(value, "__dict__", {}))
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return None
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    kind = type(value)
    if isinstance(state, dict):
        state = without_cached(kind, state)
    fields = record_of(value) if hasattr(kind, "__dataclass_fields__") else None
    return make, args, state, fields, *[each and tuple(each) for each in (items, pairs)]


def static_key(value: PyTree) -> Any:
    """Makes a hashable key; equal keys mean that jax need not trace again.

    Keys distinguish types. Containers and dataclasses are compared by content (dicts with their
    order), functions by code, defaults and plain closure values, objects by their class's
    ``__eq__`` and their parts, or by identity where the parts are unknown.
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind is float:
        return kind, value.hex()  # NaN equals NaN, -0.0 is not 0.0
    if kind in _IN_ORDER:
        return kind, tuple([static_key(x) for x in value])
    if kind is dict:
        return kind, tuple([(static_key(k), static_key(v)) for k, v in value.items()])
    if kind is set or kind is frozenset:
        return kind, frozenset([static_key(x) for x in value])
    if kind is types.FunctionType:
        return _function_key(value)
    if kind in PARTIALS and not value.__dict__:
        return kind, tuple([static_key(x) for x in (value.func, value.args, value.keywords)])
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        return kind, value  # by identity
    if isinstance(value, type):
        return _IdentityKey(value)  # a metaclass may compare otherwise, as that of jnp.float32
    return _standard_key(value)


def _standard_key(value: PyTree) -> Any:
    """Returns the key of a value that is neither plain nor compared by identity."""
    kind = type(value)
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind is bytearray:
        return kind, bytes(value)
    if kind is deque:
        return kind, value.maxlen, tuple([static_key(x) for x in value])
    if kind in KEYED:
        default = static_key(getattr(value, "default_factory", None))
        return kind, default, tuple([(static_key(k), static_key(v)) for k, v in value.items()])
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, np.ndarray):
        return _array_key(value)
    if isinstance(value, tuple) and not getattr(value, "__dict__", None):
        return kind, tuple([static_key(x) for x in value])
    if is_record(value):
        return kind, tuple([(name, static_key(x)) for name, x in record_of(value).items()])
    return _object_key(value)


def _array_key(value: np.ndarray) -> Any:
    if not is_small_array(value):
        return _IdentityKey(value)
    if value.dtype.hasobject:
        items: Any = tuple([static_key(x) for x in value.ravel().tolist()])
    else:
        items = value.tobytes()
    return type(value), value.dtype.str, value.shape, items


def _object_key(value: object) -> Any:
    try:
        hash(value)
    except Exception:  # a class may raise more than TypeError
        # A container may change after a treedef got its key.
        return UnhashableKey(copy_containers(value) if is_container(value) else value)
    return ObjectKey(value)


def is_opaque(key: object) -> bool:
    """Returns whether a key contains an unhashable object, at any depth."""
    if isinstance(key, UnhashableKey):
        return True
    if isinstance(key, (tuple, frozenset)):
        return any(is_opaque(part) for part in key)
    return False


class StaticLeaf:
    """A pytree node without children, for a static value in a container with arrays."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __repr__(self) -> str:
        return f"StaticLeaf({self.value!r})"


class LeafValue:
    """A static value in treedefs, compared by key."""

    __slots__ = ("value", "key", "changes")

    def __init__(self, value: object):
        self.changes = has_container(value)
        self.value = copy_containers(value) if self.changes else value
        self.key = static_key(value)

    def leaf(self) -> StaticLeaf:
        """Returns a leaf with this value; mutable containers are copied."""
        return StaticLeaf(copy_containers(self.value) if self.changes else self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafValue) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(
    StaticLeaf, lambda leaf: ((), LeafValue(leaf.value)), lambda aux, children: aux.leaf()
)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})
_STORES = ("STORE_DEREF", "DELETE_DEREF")


def _function_key(function: types.FunctionType) -> Any:
    values = _closed_over(function)
    defaults = (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
    if values is None or function.__dict__ or has_container(defaults):
        return types.FunctionType, function
    return (
        types.FunctionType,
        function.__code__,
        function.__name__,
        function.__qualname__,
        id(function.__globals__),
        static_key(defaults),
        static_key(values),
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
    set_beside_it = _assigned_beside(code, _outermost_code(function))
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
    """The names that nested functions of the same outer function assign to; None if unknown."""
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


def _outermost_code(function: types.FunctionType) -> types.CodeType | None:
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
