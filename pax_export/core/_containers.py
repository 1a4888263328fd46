"""Mutable containers in modules: read-only in a closed module, plain in an open one.

These are lists, dicts and sets, also derived ones, dataclasses that are not frozen, and small
numpy arrays. Other objects are shared.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from pax_export._foundations.errors import ImmutableModuleError
from pax_export._foundations.types import PyTree

KEYED = frozenset({OrderedDict, defaultdict, Counter})
PARTIALS = frozenset({functools.partial, jax.tree_util.Partial})
_CONTAINERS = (list, dict, set, deque, bytearray)
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, type})
_LARGEST_ARRAY = 1 << 16  # bytes; a larger one is looked at by identity, and never copied
MAX_DEPTH = 100  # containers, one in another


def is_small_array(value: object) -> bool:
    """True for a numpy array that is copied and compared by content."""
    return isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY


def is_record(value: object) -> bool:
    """True for a dataclass that is compared by its fields."""
    kind = type(value)
    if not hasattr(kind, "__dataclass_fields__") or kind.__eq__ is object.__eq__:
        return False
    return not hasattr(kind, "_pax_flat")  # modules are compared as modules


def _can_change(record: Any) -> bool:
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
    return _is_static_array(value) or (is_record(value) and _can_change(value))


def ends(value: object, depth: int = MAX_DEPTH) -> bool:
    """False if a container contains itself or nests too deeply, which jax does not survive."""
    if isinstance(value, (list, tuple)):
        parts: Iterable[Any] = value
    elif isinstance(value, dict):
        parts = dict.values(value)
    else:
        return True
    if not depth:
        return False
    for part in parts:  # noqa: SIM110 - all() would take another frame for each container
        if not ends(part, depth - 1):
            return False
    return True


def copy_containers(value: PyTree) -> Any:
    """Copies mutable containers at every depth, read-only ones as plain; shares other values."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind in READ_ONLY:
        return copy_containers(_plain(value))
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
    except Exception:  # of a third-party `__copy__`, which it hides: such an object is shared
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


# --- read-only containers --------------------------------------------------------------


def _refuse(
    container: list[Any] | dict[Any, Any] | set[Any] | deque[Any], *args: object, **kwargs: object
) -> Any:
    kind = READ_ONLY[type(container)].__name__
    raise ImmutableModuleError(
        f"A {kind} of an immutable module cannot be changed in place.",
        got=repr(container)[:120],
        write="module = module.replace(name=...), with a new "
        f"{kind}; or change it in a function decorated with pax.pure",
    )


_CHANGES = (
    *("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "rotate"),
    *("appendleft", "extendleft", "popleft", "update", "setdefault", "popitem", "move_to_end"),
    *("subtract", "add", "discard", "difference_update", "intersection_update"),
    *("symmetric_difference_update", "__setitem__", "__delitem__", "__iadd__", "__imul__"),
    *("__ior__", "__iand__", "__isub__", "__ixor__"),
)


def _read_only_class(kind: type) -> type:
    """A subclass whose methods that change it raise; copies and pickles are of the class itself."""
    methods: dict[str, Any] = {name: _refuse for name in _CHANGES if hasattr(kind, name)}
    methods["__reduce_ex__"] = lambda self, protocol: (copy.copy, (_plain(self),))
    methods["__repr__"] = lambda self: repr(copy_containers(self))
    methods["copy"] = lambda self: _plain(self)
    return type(f"ReadOnly{kind.__name__.title()}", (kind,), {"__slots__": (), **methods})


_KINDS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
_READ_ONLY_OF: dict[type, type] = {kind: _read_only_class(kind) for kind in _KINDS}
READ_ONLY: dict[type, type] = {new: kind for kind, new in _READ_ONLY_OF.items()}


def _plain(value: PyTree) -> Any:
    """A copy of a read-only container as one of its own class; not of containers in it."""
    kind = READ_ONLY[type(value)]
    if kind is defaultdict:
        return defaultdict(value.default_factory, value)
    return deque(value, value.maxlen) if kind is deque else kind(value)


def read_only(value: PyTree) -> Any:
    """A value whose containers are read-only; those of users' classes stay as they are."""
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is tuple:
        return tuple(map(read_only, value)) if value and has_container(value) else value
    if kind in _READ_ONLY_OF:
        return _read_only_copy(kind, value)
    if isinstance(value, tuple) and hasattr(kind, "_make") and has_container(value):
        return _with_attributes_of(value, tuple.__new__(kind, map(read_only, value)))
    if isinstance(value, np.ndarray) and _is_static_array(value) and value.flags.writeable:
        value = value.copy()
        value.setflags(write=False)
    return value


def _read_only_copy(kind: type, value: PyTree) -> Any:
    cls: Any = _READ_ONLY_OF[kind]
    if kind is deque:
        new = cls.__new__(cls)
        deque.__init__(new, map(read_only, value), value.maxlen)
    elif issubclass(kind, dict):
        new = cls.__new__(cls)
        if kind is defaultdict:
            defaultdict.__init__(new, value.default_factory)
        for key, part in value.items():
            kind.__setitem__(new, key, read_only(part))
    else:
        new = cls(map(read_only, value))
    return new


def _is_static_array(value: object) -> bool:
    return is_small_array(value) and not is_number_array(value)  # type: ignore[arg-type]


def is_number_array(value: np.ndarray) -> bool:
    """True for numpy arrays that are leaves; others are static."""
    # numpy reports the small floats and integers of ml_dtypes as kind "V", like records.
    dtype = value.dtype
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def may_change(value: PyTree) -> bool:
    """True if a value can still be changed in place after `read_only`."""
    kind = type(value)
    if kind in READ_ONLY or kind is tuple:
        parts = (*dict.keys(value), *dict.values(value)) if isinstance(value, dict) else value
        return any(map(may_change, parts))
    if isinstance(value, np.ndarray):
        return _is_static_array(value) and value.flags.writeable
    return has_container(value)


def _register(kind: type, key: Any, keys_of: Any, values_of: Any, make: Any) -> None:
    cls = _READ_ONLY_OF[kind]

    def unflatten(aux: Any, children: Any) -> Any:
        return _read_only_copy(kind, make(aux, children))

    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda x: (tuple(zip(map(key, keys_of(x)), values_of(x))), _aux(x, keys_of)),
        unflatten,
        flatten_func=lambda x: (tuple(values_of(x)), _aux(x, keys_of)),
    )


def _aux(value: PyTree, keys_of: Any) -> Any:
    if not isinstance(value, dict):
        return None
    return tuple(keys_of(value)), getattr(value, "default_factory", None)


def _values_of(value: PyTree) -> list[Any]:
    return [value[key] for key in sorted(value)]


_register(list, SequenceKey, lambda x: range(len(x)), list, lambda aux, parts: list(parts))
_register(dict, DictKey, sorted, _values_of, lambda aux, parts: dict(zip(aux[0], parts)))
_register(
    defaultdict, DictKey, sorted, _values_of,
    lambda aux, parts: defaultdict(aux[1], zip(aux[0], parts)),
)  # fmt: skip
_register(
    OrderedDict, DictKey, list, lambda x: list(x.values()),
    lambda aux, parts: OrderedDict(zip(aux[0], parts)),
)  # fmt: skip
