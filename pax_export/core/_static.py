"""Static values: how data that is not in the tree is compared, copied and kept.

Static data lies in treedefs, and jax compares treedefs to decide whether a
function must be traced again.  Two models built by one recipe must therefore
have equal static data, even where Python calls two objects different (two
lambdas made by one line of code), and different static data where Python calls
them equal (``1`` and ``True``).
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import jax

_BY_VALUE = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})
_IN_ORDER = frozenset({list, tuple})
_KEYED = frozenset({OrderedDict, defaultdict, Counter})
_CONTAINERS = (list, dict, set, deque, bytearray)


class UnhashableKey:
    """Stands in a key for an object that has ``==`` but no hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnhashableKey):
            return NotImplemented
        if self.value is other.value:
            return True
        return type(self.value) is type(other.value) and _equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _equal(a: Any, b: Any) -> bool:
    """``a == b`` where that has an answer; objects that cannot say differ."""
    try:
        return bool(a == b)
    except Exception:  # whatever a foreign __eq__ raises, it has not said "equal"
        return False


def static_key(value: Any) -> Any:
    """Makes a hashable key; equal keys mean that jax need not trace again.

    Args:
        value: any static attribute value.

    Returns:
        A hashable that tells apart values of different types, treats containers
        by content (dicts in their order) and functions by code, defaults and
        plain closure values.
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
    if kind in _KEYED or kind is deque or kind is bytearray:
        return _standard_key(value)
    if kind is types.FunctionType:
        return _function_key(value)
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        return kind, tuple([static_key(x) for x in parts])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind, tuple([static_key(x) for x in value])
    return _object_key(value)


def _standard_key(value: Any) -> Any:
    """The key of a container of the standard library."""
    if isinstance(value, bytearray):
        return bytearray, bytes(value)
    if isinstance(value, deque):
        return deque, value.maxlen, tuple([static_key(x) for x in value])
    default = static_key(getattr(value, "default_factory", None))
    items = tuple([(static_key(k), static_key(v)) for k, v in value.items()])
    return type(value), default, items


def _object_key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        # A container may change after a treedef got its key.
        held = _copy_of_own_kind(value) if isinstance(value, _CONTAINERS) else value
        return UnhashableKey(held)
    return type(value), value


def _function_key(function: types.FunctionType) -> Any:
    """Two functions made by one piece of code with the same values are one.

    A closure over anything but plain values is compared by identity: it may
    hold state.  So is one that assigns to the variables it closes over.
    """
    plain = _closure_key(function)
    if plain is None or function.__dict__:
        return types.FunctionType, function
    defaults = static_key((function.__defaults__, function.__kwdefaults__))
    return (
        types.FunctionType,
        function.__code__,
        id(function.__globals__),
        defaults,
        plain,
    )


def _closure_key(function: types.FunctionType) -> tuple | None:
    if function.__closure__ and _assigns_freely(function.__code__):
        return None
    values = []
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            return None
        if type(value) not in _BY_VALUE and type(value) is not float:
            return None
        values.append(static_key(value))
    return tuple(values)


def _assigns_freely(code: types.CodeType) -> bool:
    """True if code, or a function in it, assigns to a variable it closes over."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF"):
            if instruction.argval in code.co_freevars:
                return True
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return any(map(_assigns_freely, inner))


def is_opaque(key: Any) -> bool:
    """True if a key holds an object that has no hash, at any depth."""
    if isinstance(key, UnhashableKey):
        return True
    if isinstance(key, (tuple, frozenset)):
        return any(is_opaque(part) for part in key)
    return False


def has_container(value: Any) -> bool:
    """True if a list, dict or set lies in a static value, where it can change."""
    if isinstance(value, _CONTAINERS):
        return True
    return isinstance(value, tuple) and any(has_container(x) for x in value)


def copy_containers(value: Any) -> Any:
    """Copies the standard containers at every depth; shares all else.

    Of a user's own kind of list, dict or set the outermost level is copied, where
    it can be.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([copy_containers(x) for x in value])
    if kind is dict:
        return {k: copy_containers(v) for k, v in value.items()}
    if kind is set:
        return set(value)
    if kind is deque:
        return deque(map(copy_containers, value), value.maxlen)
    if kind in _KEYED:
        new = value.copy()  # with its default factory
        for key in new:
            new[key] = copy_containers(new[key])
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(copy_containers, value))
    return _copy_of_own_kind(value) if isinstance(value, _CONTAINERS) else value


def _copy_of_own_kind(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:  # whatever a foreign class raises, it cannot be copied
        return value


class StaticLeaf:
    """Wraps a leaf that is no array, in a container that also holds arrays.

    It is a pytree node without children: jax sees the arrays beside it and
    keeps the value in the treedef.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"StaticLeaf({self.value!r})"


class _LeafValue:
    """The value of a `StaticLeaf` as treedefs hold it: compared by key."""

    __slots__ = ("value", "key")

    def __init__(self, value: Any):
        self.value = value
        self.key = static_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LeafValue) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(
    StaticLeaf,
    lambda leaf: ((), _LeafValue(leaf.value)),
    lambda aux, children: StaticLeaf(aux.value),
)
