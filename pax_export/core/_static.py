"""Static data: how values are compared, the ModuleDef that holds them, and derived classes.

jax compares treedefs to decide whether to trace again. So equal models need equal static data,
even where Python distinguishes objects (two lambdas of one line), and different data must differ
even where Python calls it equal (``1`` and ``True``).
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from pax_export.core._containers import (
    KEYED,
    PARTIALS,
    READ_ONLY,
    copy_containers,
    is_record,
    is_small_array,
    may_change,
    read_only,
    record_of,
)

if TYPE_CHECKING:
    from pax_export.core._containers import BuiltIn

# Values are of any class here, and distinguished by it: type checkers know nothing of what is in
# them.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

_BY_VALUE = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})
_IN_ORDER = frozenset({list, tuple})


class _IdentityKey:
    """Replaces, in a key, an object that equals no other object."""

    __slots__ = ("value",)

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def static_key(value: Any) -> Hashable:
    """Makes a hashable key; equal keys mean that jax need not trace again.

    Keys distinguish types. Containers and dataclasses are compared by content (dicts with their
    order), functions by identity unless they read nothing that may change (`is_self_contained`),
    other objects by ``==`` if they have a hash, otherwise by identity.
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


def _standard_key(value: Any) -> Hashable:
    """Returns the key of a value that is neither plain nor compared by identity."""
    kind = type(value)
    if kind in READ_ONLY:
        return static_key(copy_containers(value))
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind is types.MappingProxyType:  # its hash is that of a dict, which has none
        return kind, static_key(dict(value))
    if kind is bytearray:
        return kind, bytes(value)
    if kind is slice:  # has no hash before Python 3.12
        return kind, static_key((value.start, value.stop, value.step))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, np.ndarray):
        return _array_key(value)
    if is_record(value):
        return kind, tuple([(name, static_key(x)) for name, x in record_of(value).items()])
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return kind, _container_key(value)
    try:
        hash(value)
    except TypeError:
        return _IdentityKey(value)
    return kind, value


def _container_key(value: BuiltIn | frozenset[Any]) -> Hashable:
    """Returns the content of a container of the standard library or of a user's class."""
    more = static_key(getattr(value, "__dict__", None)) if type(value) not in KEYED else None
    if isinstance(value, dict):
        items = tuple([(static_key(k), static_key(v)) for k, v in dict.items(value)])
        return items, static_key(getattr(value, "default_factory", None)), more
    items = [static_key(x) for x in value]
    in_order = isinstance(value, (list, tuple, deque))
    return tuple(items) if in_order else frozenset(items), getattr(value, "maxlen", None), more


def _array_key(value: np.ndarray) -> Hashable:
    if not is_small_array(value):
        return _IdentityKey(value)
    if value.dtype.hasobject:
        items: Any = tuple([static_key(x) for x in value.ravel().tolist()])
    else:
        items = value.tobytes()
    return type(value), value.dtype.str, value.shape, items


class StaticLeaf:
    """A pytree node without children, for a static value in a container with arrays."""

    __slots__ = ("value", "known")

    def __init__(self, value: object):
        self.value = read_only(value)
        self.known = None if may_change(self.value) else LeafValue(self.value)

    def __reduce__(self) -> tuple[type[StaticLeaf], tuple[Any]]:
        return StaticLeaf, (self.value,)

    def __repr__(self) -> str:
        return f"StaticLeaf({self.value!r})"


class LeafValue:
    """A static value in treedefs, compared by key."""

    __slots__ = ("value", "key")

    def __init__(self, value: object):
        self.value = read_only(copy_containers(value))
        self.key = static_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeafValue) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(  # type: ignore  # jax says nothing of its keys
    StaticLeaf,
    lambda leaf: ((), leaf.known or LeafValue(leaf.value)),
    lambda known, children: StaticLeaf(
        copy_containers(known.value) if may_change(known.value) else known.value
    ),
)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})
_OF_JAX = frozenset({"jax", "jax.lax", "jax.nn", "jax.numpy"})
_PURE_BUILTINS = frozenset({
    abs, all, any, callable, divmod, isinstance, issubclass, iter, len, max, min, next, pow, repr,
    round, sorted, sum,
})  # fmt: skip


def _function_key(function: types.FunctionType) -> Hashable:
    if not is_self_contained(function):
        return types.FunctionType, function
    return (
        types.FunctionType,
        function.__code__,
        function.__module__,
        function.__qualname__,
        static_key((function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))),
        tuple([(name, _global(function, name)) for name in globals_read(function.__code__)[0]]),
    )


def is_self_contained(function: types.FunctionType) -> bool:
    """Returns whether a function reads only its arguments, constants, and modules of jax.

    Another function of the same code then computes the same at any time. A variable outside may
    change between two such functions, and also between the making of one and its trace, so
    comparing its values would not do.
    """
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if function.__closure__ or function.__dict__ or not all(map(_is_plain, defaults)):
        return False
    names, only_reads = globals_read(function.__code__)
    return only_reads and all(_never_changes(_global(function, name)) for name in names)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _global(function: types.FunctionType, name: str) -> Any:
    return function.__globals__.get(name, function.__builtins__.get(name))  # type: ignore


def _never_changes(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__ in _OF_JAX
    if isinstance(value, type):
        return value.__module__ == "builtins"
    return isinstance(value, types.BuiltinFunctionType) and value in _PURE_BUILTINS


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """The global names that code, and code in it, reads; and whether it only reads them."""
    found: dict[str, None] = {}
    only_reads = True
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            found[each.argval] = None
        elif any(word in each.opname for word in ("GLOBAL", "NAME", "IMPORT", "LOAD_LOCALS")):
            only_reads = False
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names, inner_only_reads = globals_read(inner)
            found |= dict.fromkeys(names)
            only_reads = only_reads and inner_only_reads
    return tuple(found), only_reads


# --- ModuleDef: the names of subtrees, and the static data, of one module -------------


#: Under this name a module of a labeled net keeps its label, as a static attribute.
LABEL = "_path_in_net"


class Label:
    """The path of a module in a labeled net; ignored by comparisons."""

    __slots__ = ("path", "net")
    #: Whether any net was ever labeled: modules do not look for labels before.
    in_use = False

    def __init__(self, path: str, net: object):
        self.path, self.net = path, net
        Label.in_use = True

    def __repr__(self) -> str:
        return self.path

    def differs(self, other: Label | None) -> bool:
        """Whether this is another module of the same net."""
        return other is not None and self.net is other.net and self.path != other.path


class ModuleDef:
    """All of a module but its children; interned, so that treedefs compare by pointer.

    Attributes:
        cls: the class.
        names: the attributes that are subtrees, in child order: arrays, then mixed ones.
        array_count: the number of `names` that contain arrays only.
        template: all attributes in order of assignment, with None for children.
        static: the static attributes; lists, dicts and sets are read-only.
        changing: the static attributes that may be changed in place all the same, such as a
            dataclass that is not frozen: these are compared at each flatten.
        lazy: whether a rebuilt module may fill in its attributes later.
        keys: the jax key of each child.
        label: the path of the module in a labeled net, or None.
    """

    __slots__ = (
        "cls", "names", "array_count", "template", "static", "changing", "lazy",
        "keys", "label", "_key", "_hash", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        key: tuple[Any, ...],
        cls: type[Any],
        order: Iterable[str],
        arrays: tuple[str, ...],
        mixed: tuple[str, ...],
        static: Mapping[str, Any],
    ):
        self._key = key
        self._hash = hash(key)
        self.cls = cls
        self.names = arrays + mixed
        self.array_count = len(arrays)
        # A snapshot: the list of an open module may be appended to later.
        self.static = {n: read_only(copy_containers(v)) for n, v in static.items()}
        self.changing = tuple([n for n, v in self.static.items() if may_change(v)])
        self.template = {name: self.static.get(name) for name in order}
        # An attribute that a class attribute hides would never be asked for.
        self.lazy = not self.changing and not any(hasattr(cls, n) for n in order)
        self.label: Label | None = static.get(LABEL)
        self.keys = tuple([GetAttrKey(name) for name in self.names])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ModuleDef):
            return NotImplemented
        # Two threads may have created one each, and one with a label is not interned.
        same = self._hash == other._hash and self._key == other._key
        return same and not (self.label and self.label.differs(other.label))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"ModuleDef({self.cls.__qualname__}, {self.names}, {self.static})"

    def derived(self, cls: type, static: Mapping[str, Any]) -> ModuleDef:
        """Returns the moduledef of another class, or with other static values."""
        arrays, mixed = self.names[: self.array_count], self.names[self.array_count :]
        left = {*self.names, *static}
        order = tuple([name for name in {**self.template, **static} if name in left])
        return intern_moduledef(cls, order, arrays, mixed, static)


_interned: weakref.WeakValueDictionary[tuple[Any, ...], ModuleDef] = weakref.WeakValueDictionary()


def intern_moduledef(
    cls: type,
    order: tuple[str, ...],
    arrays: tuple[str, ...],
    mixed: tuple[str, ...],
    static: Mapping[str, Any],
) -> ModuleDef:
    """Returns the one moduledef with this content; `order` has all names as assigned."""
    items = frozenset([(n, static_key(value)) for n, value in static.items() if n != LABEL])
    key = (cls, arrays, mixed, items)
    moduledef = _interned.get(key) if LABEL not in static else None
    if moduledef is None:
        moduledef = ModuleDef(key, cls, order, arrays, mixed, static)
        if LABEL not in static:
            moduledef = _interned.setdefault(key, moduledef)
    return moduledef


# --- derived classes, and verbs of rooms above -------------------------------------


# What other rooms add to modules: classes derived from others, and verbs. A derived class is cached
# by its base and its recipe, a tuple of ``(aspect, value)`` in the order of registration. So
# policies and adapters commute, and equal models have equal treedefs. Pickles store the recipe.

Recipe = tuple[tuple[str, Any], ...]
Builder = Callable[[type, dict[str, Any], Any], dict[str, Any]]

_aspects: dict[str, Builder] = {}
_verbs: dict[str, Callable[[], Any]] = {}


def register_verbs(**verbs: Callable[[], Any]) -> None:
    """Adds functions of other rooms that modules call; each is looked up when it is first used."""
    _verbs.update(verbs)


def verb(name: str) -> Any:
    """Returns a function that another room registered."""
    return _verbs[name]()


def register_aspect(name: str, build: Builder) -> None:
    """Adds a way to derive classes: ``build(base, namespace, value)`` returns additions."""
    _aspects[name] = build


def base_of(cls: type) -> type:
    """The class as the user wrote it."""
    return vars(cls).get("_pax_base", cls)


def recipe_of(cls: type) -> Recipe:
    """The aspects that a class was derived with; empty for a user's class."""
    return vars(cls).get("_pax_recipe", ())


def aspect_of(cls: type, name: str) -> Any:
    """Returns the value of one aspect of a class, or None."""
    return dict(recipe_of(cls)).get(name)


def builders_of(cls: type) -> tuple[Builder, ...]:
    """The functions that built a class from its recipe, in other rooms too."""
    return tuple([_aspects[name] for name, _ in recipe_of(cls)])


def derive_class(cls: type, name: str, value: Hashable) -> type:
    """The class with one aspect set, or taken off if the value is None."""
    values = {**dict(recipe_of(cls)), name: value}
    recipe = tuple([(n, values[n]) for n in _aspects if values.get(n) is not None])
    return from_recipe(base_of(cls), recipe)


def from_recipe(base: type, recipe: Recipe, builders: tuple[Builder, ...] = ()) -> type:
    """The class derived by a recipe; `builders` are for pickles, which import their packages."""
    if not recipe:
        return base
    if "_pax_derived" not in vars(base):
        base._pax_derived = {}  # type: ignore[attr-defined]
    known: dict[Hashable, type] = vars(base)["_pax_derived"]
    key = static_key(recipe)
    if key not in known:
        known[key] = _make_class(base, recipe)
    return known[key]


def _make_class(base: type, recipe: Recipe) -> type:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_pax_base": base,
        "_pax_recipe": recipe,
    }
    for name, value in recipe:
        namespace.update(_aspects[name](base, namespace, value))
    return type(base)(base.__name__, (base,), namespace)
