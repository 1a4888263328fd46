"""Mutable containers in static data, and their copies.

These are lists, dicts and sets, also derived ones, dataclasses that are not frozen, and small
numpy arrays. Other objects are shared.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import jax
import numpy as np

from pax_export._types import PyTree

KEYED = frozenset({OrderedDict, defaultdict, Counter})
PARTIALS = frozenset({functools.partial, jax.tree_util.Partial})
_CONTAINERS = (list, dict, set, deque, bytearray)
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, type})
_LARGEST_ARRAY = 1 << 16  # bytes; a larger one is looked at by identity, and never copied


def is_container(value: object) -> bool:
    """True for lists, dicts, sets and instances of their subclasses."""
    return isinstance(value, _CONTAINERS)


def is_small_array(value: object) -> bool:
    """True for a numpy array that is copied and compared by content."""
    return isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY


def is_record(value: object) -> bool:
    """True for a dataclass that is compared by its fields."""
    kind = type(value)
    if not hasattr(kind, "__dataclass_fields__") or kind.__eq__ is object.__eq__:
        return False
    return not hasattr(kind, "_pax_flat")  # modules are compared as modules


def _can_change(record: PyTree) -> bool:
    """Returns whether a record is a mutable dataclass or contains a mutable container."""
    if not type(record).__dataclass_params__.frozen:
        return True
    return any(map(has_container, record_of(record).values()))


def record_of(value: PyTree) -> dict[str, Any]:
    """The fields of a dataclass and its other attributes."""
    kind = type(value)
    found = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return found | without_cached(kind, getattr(value, "__dict__", {}))


def without_cached(kind: type, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object, without cached properties."""
    return {
        name: value
        for name, value in attributes.items()
        if not isinstance(getattr(kind, str(name), None), functools.cached_property)
    }


def has_container(value: PyTree) -> bool:
    """True if a static value contains a mutable object."""
    kind = type(value)
    if kind in _UNCHANGING:
        return False
    if isinstance(value, _CONTAINERS):
        return True
    if isinstance(value, tuple):
        return any(has_container(x) for x in value)
    if kind in PARTIALS:
        return any(map(has_container, (value.func, *value.args, *value.keywords.values())))
    return is_small_array(value) or (is_record(value) and _can_change(value))


def copy_containers(value: PyTree) -> Any:
    """Copies mutable containers at every depth; shares all other values."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is list or kind is tuple:
        return kind([copy_containers(x) for x in value])
    if kind is dict:
        return {k: copy_containers(v) for k, v in value.items()}
    if kind is set:
        return set(value)
    if kind is deque:
        return deque(map(copy_containers, value), value.maxlen)
    if not has_container(value):
        return value
    if kind in PARTIALS:
        keywords = {name: copy_containers(x) for name, x in value.keywords.items()}
        return kind(copy_containers(value.func), *map(copy_containers, value.args), **keywords)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return _with_attributes_of(value, tuple.__new__(kind, map(copy_containers, value)))
    return _copy_of_own_kind(value)


def _copy_of_own_kind(value: object) -> Any:
    """Copies an instance of a user's class, or returns it if it cannot be copied."""
    try:
        if isinstance(value, tuple):
            new = tuple.__new__(type(value), map(copy_containers, value))
            return _with_attributes_of(value, new)
        new = copy.copy(value)
    except Exception:  # third-party classes may raise anything
        return value
    # Past the class's own methods: a copy that is filled does not check or count again.
    if isinstance(new, dict):
        for key, part in list(dict.items(new)):
            if has_container(part):
                dict.__setitem__(new, key, copy_containers(part))
    elif isinstance(new, list):
        for index, part in enumerate(list.__iter__(new)):
            if has_container(part):
                list.__setitem__(new, index, copy_containers(part))
    elif is_record(new):
        for name, part in record_of(new).items():
            if has_container(part):
                object.__setattr__(new, name, copy_containers(part))
    return new


def _with_attributes_of(value: object, new: object) -> Any:
    if getattr(value, "__dict__", None):
        vars(new).update({name: copy_containers(x) for name, x in vars(value).items()})
    return new
