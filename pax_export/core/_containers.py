"""Mutable containers in modules: read-only in a closed module, plain in an open one.

These are lists, dicts and sets, also derived ones, dataclasses that are not frozen, and small
numpy arrays. Other objects are shared.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, TypeVar

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from pax_export._foundations.errors import ImmutableModuleError

# Values are of any class here, and distinguished by it: type checkers know nothing of what is in
# them.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

T = TypeVar("T")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    #: The built-in containers and classes derived from them.
    BuiltIn: TypeAlias = (
        list[Any] | tuple[Any, ...] | dict[Any, Any] | set[Any] | deque[Any] | bytearray
    )
    Indexed: TypeAlias = list[Any] | dict[Any, Any]
    #: What has other values in it, or can be changed itself.
    Container: TypeAlias = BuiltIn | functools.partial[Any] | np.ndarray | DataclassInstance

KEYED = frozenset({OrderedDict, defaultdict, Counter})
PARTIALS = frozenset({functools.partial, jax.tree_util.Partial})
_CONTAINERS = (list, dict, set, deque, bytearray)
_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, type})
_LARGEST_ARRAY = 1 << 16  # bytes; a larger one is looked at by identity, and never copied
MAX_DEPTH = 100  # containers, one in another


def is_small_array(value: object) -> TypeGuard[np.ndarray]:
    """True for a numpy array that is copied and compared by content."""
    return isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY


def is_record(value: object) -> TypeGuard[DataclassInstance]:
    """True for a dataclass that is compared by its fields."""
    kind = type(value)
    if not hasattr(kind, "__dataclass_fields__") or kind.__eq__ is object.__eq__:
        return False
    return not hasattr(kind, "_pax_flat")  # modules are compared as modules


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """True for dicts; type checkers then know that anything may be in it."""
    return isinstance(value, dict)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """True for lists and tuples; type checkers then know that anything may be in it."""
    return isinstance(value, (list, tuple))


def _can_change(record: DataclassInstance) -> bool:
    """Returns whether a record is a mutable dataclass or contains a mutable container."""
    parameters: Any = type(record).__dataclass_params__  # type: ignore[attr-defined]
    return not parameters.frozen or any(map(has_container, record_of(record).values()))


def record_of(value: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass and its other attributes."""
    found = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return found | without_cached(type(value), getattr(value, "__dict__", {}))


def without_cached(kind: type, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an object, without cached properties."""
    return {
        name: value
        for name, value in attributes.items()
        if not isinstance(getattr(kind, str(name), None), functools.cached_property)
    }


def has_container(value: Any) -> TypeGuard[Container]:
    """True if a static value contains a mutable object."""
    if type(value) in _UNCHANGING:
        return False
    if isinstance(value, _CONTAINERS):
        return True
    if isinstance(value, tuple):
        return any(map(has_container, value))
    if type(value) in PARTIALS:
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


def copy_containers(value: T) -> T:
    """Copies mutable containers at every depth, read-only ones as plain; shares other values."""
    return _copied(value) if has_container(value) else value


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in READ_ONLY:
        return _copied(_plain(value))
    if kind is list or kind is tuple:
        return kind(map(copy_containers, value))
    if kind is dict:
        return {k: copy_containers(v) for k, v in value.items()}
    if kind is set:
        return set(value)
    if kind is deque:
        return deque(map(copy_containers, value), value.maxlen)
    if kind in PARTIALS:
        keywords = {name: copy_containers(x) for name, x in value.keywords.items()}
        return kind(copy_containers(value.func), *map(copy_containers, value.args), **keywords)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return _with_attributes_of(value, tuple.__new__(kind, map(copy_containers, value)))
    return _copy_of_own_kind(value)


def _copy_of_own_kind(value: Container) -> Any:
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


def _with_attributes_of(value: tuple[Any, ...], new: T) -> T:
    if getattr(value, "__dict__", None):
        vars(new).update({name: copy_containers(x) for name, x in vars(value).items()})
    return new


# --- read-only containers --------------------------------------------------------------


def _refuse(container: BuiltIn, *args: object, **kwargs: object) -> NoReturn:
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


def _plain(value: BuiltIn) -> Any:
    """A copy of a read-only container as one of its own class; not of containers in it."""
    kind: Any = READ_ONLY[type(value)]
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, value)
    return deque(value, value.maxlen) if isinstance(value, deque) else kind(value)


def _read_only_class(kind: type) -> type:
    """A subclass whose methods that change it raise; copies and pickles are of the class itself."""

    def reduce_to_plain(self: BuiltIn, protocol: int) -> tuple[Callable[..., Any], tuple[Any]]:
        return copy.copy, (_plain(self),)

    def represent(self: BuiltIn) -> str:
        return repr(copy_containers(self))

    methods: dict[str, Any] = {name: _refuse for name in _CHANGES if hasattr(kind, name)}
    methods |= {"__reduce_ex__": reduce_to_plain, "__repr__": represent, "copy": _plain}
    return type(f"ReadOnly{kind.__name__.title()}", (kind,), {"__slots__": (), **methods})


_KINDS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
_READ_ONLY_OF: dict[type, type] = {kind: _read_only_class(kind) for kind in _KINDS}
READ_ONLY: dict[type, type] = {new: kind for kind, new in _READ_ONLY_OF.items()}


def read_only(value: T) -> T:
    """A value whose containers are read-only; those of users' classes stay as they are."""
    may_have = type(value) in _READ_ONLY_OF or isinstance(value, (tuple, np.ndarray))
    if may_have and has_container(value):
        return _read_only_value(value)
    return value  # type: ignore[return-value]


def _read_only_value(value: Any) -> Any:
    kind = type(value)
    if kind in _READ_ONLY_OF:
        return _read_only_copy(kind, value)
    if kind is tuple:
        return tuple(map(read_only, value))
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return _with_attributes_of(value, tuple.__new__(kind, map(read_only, value)))
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.copy()
        value.setflags(write=False)
    return value


def _read_only_copy(kind: type, value: BuiltIn) -> Any:
    cls: Any = _READ_ONLY_OF[kind]
    if isinstance(value, dict):
        new = cls.__new__(cls)
        if isinstance(value, defaultdict):
            defaultdict.__init__(new, value.default_factory)
        for key, part in value.items():
            kind.__setitem__(new, key, read_only(part))  # type: ignore[attr-defined]
        return new
    if isinstance(value, deque):
        new = cls.__new__(cls)
        deque.__init__(new, map(read_only, value), value.maxlen)
        return new
    return cls(map(read_only, value))


def _is_static_array(value: object) -> TypeGuard[np.ndarray]:
    return is_small_array(value) and not is_number_array(value)


def is_number_array(value: np.ndarray) -> bool:
    """True for numpy arrays that are leaves; others are static."""
    # numpy reports the small floats and integers of ml_dtypes as kind "V", like records.
    dtype = value.dtype
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def may_change(value: object) -> bool:
    """True if a value can still be changed in place after `read_only`."""
    if not has_container(value):
        return False
    if isinstance(value, np.ndarray):
        return value.flags.writeable
    kind = type(value)
    if kind is tuple or kind in READ_ONLY:
        parts: Any = (*value, *dict.values(value)) if isinstance(value, dict) else value
        return any(map(may_change, parts))
    return True


# --- read-only containers as jax sees them: as it sees plain ones ----------------------------


def _register(kind: type, entry: Callable[[Any], Any], keys_of: Callable[[Any], Any]) -> None:
    def flatten(value: Indexed) -> tuple[list[Any], tuple[tuple[Any, ...], Any]]:
        keys = tuple(keys_of(value))
        return [value[key] for key in keys], (keys, getattr(value, "default_factory", None))

    def flatten_with_keys(
        value: Indexed,
    ) -> tuple[list[tuple[Any, Any]], tuple[tuple[Any, ...], Any]]:
        parts, aux = flatten(value)
        return list(zip(map(entry, aux[0]), parts)), aux

    def unflatten(aux: tuple[tuple[Any, ...], Any], parts: Iterable[Any]) -> Any:
        keys, default_factory = aux
        if kind is list:
            return _read_only_copy(kind, list(parts))
        if kind is defaultdict:
            return _read_only_copy(kind, defaultdict(default_factory, zip(keys, parts)))
        return _read_only_copy(kind, dict(zip(keys, parts)))

    jax.tree_util.register_pytree_with_keys(  # type: ignore  # jax says nothing of its keys
        _READ_ONLY_OF[kind], flatten_with_keys, unflatten, flatten_func=flatten
    )


_register(list, SequenceKey, lambda value: range(len(value)))
_register(dict, DictKey, sorted)
_register(defaultdict, DictKey, sorted)
_register(OrderedDict, DictKey, list)
