"""Modules as pytrees: kinds of attributes, flatten and unflatten. The hot path of the library.

* ``(children, moduledef)`` is kept on the instance, so flatten is one attribute read.
* A `ModuleDef` has everything about a module but its children, and is interned.
* A rebuilt module has that pair only; attributes are filled in when they are first read.
* Lists, dicts and sets among the attributes of a closed module are read-only; those among the
  children are plain, because jax is fastest with these, and nobody else sees them.

docs/decisions/flatten.md has the measurements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.jax import is_tracer
from pax_export.core._containers import (
    MAX_DEPTH,
    copy_containers,
    ends,
    has_container,
    is_number_array,
    is_sequence,
    read_only,
)
from pax_export.core._static import ModuleDef, StaticLeaf, intern_moduledef

if TYPE_CHECKING:
    from pax_export._foundations.types import Array, TreeDef

T = TypeVar("T")

# Slots of `Node` are read here.
# pyright: reportPrivateUsage=false

ARRAYS, MIXED, STATIC = "arrays", "mixed", "static"

_object_new = object.__new__


class Node:
    """The base class of modules: stores attributes and knows nothing of modules.

    It has a plain metaclass, so that ``isinstance(x, Node)`` stays a fast check
    in C, whatever the metaclass of `Module` is.

    Slots:
        _pax_flat: ``(children, moduledef)``; absent while an attribute may change.
        _pax_kinds: what each attribute is, while `_pax_flat` is absent: of an open module that
            was changed or has containers, and where static data may change in place.
        _pax_owner: the scope that may change this module (see `_scopes.py`).
        _pax_folded: ``((leaves,), treedef)`` of a module not accessed
            since a jitted function returned it (see `transforms/_jit.py`).
    """

    if TYPE_CHECKING:
        _pax_owner: Any  # a `MutationScope`, or None

    __slots__ = (
        "_pax_flat", "_pax_folded", "_pax_kinds", "_pax_owner", "__dict__", "__weakref__",
    )  # fmt: skip

    # Attributes of a class that are random keys of the legacy kind, uint32.
    rng_attributes: ClassVar[tuple[str, ...]] = ()
    # When a call changes the state of the module itself: "in train mode", "always"; "" is unknown.
    _pax_changes: ClassVar[str] = ""

    def __getattr__(self, name: str) -> Any:
        """Handles what normal lookup misses: the slots, and attributes not filled in yet."""
        if name == "_pax_flat":
            return self._pax_flat if unfold_node(self) else _flatten_now(self)
        if name in _MAY_BE_ABSENT:
            return None
        if fill_node(self):
            return getattr(self, name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )


_MAY_BE_ABSENT = frozenset([name for name in Node.__slots__ if name.startswith("_pax_")])

attributes_now = Node.__dict__["__dict__"].__get__  # the dict itself, perhaps not filled in yet
_get_flat = Node.__dict__["_pax_flat"].__get__
set_flat = Node.__dict__["_pax_flat"].__set__
_delete_flat = Node.__dict__["_pax_flat"].__delete__
set_kinds = Node.__dict__["_pax_kinds"].__set__
set_folded = Node.__dict__["_pax_folded"].__set__
set_owner = Node.__dict__["_pax_owner"].__set__


#: Returns the pair for jax.
flatten: Callable[[Node], tuple[tuple[Any, ...], ModuleDef]] = operator.attrgetter("_pax_flat")


class EmptyNode:
    """Marks the place of an array that is not there; a pytree without leaves.

    Example:
        >>> from pax_export import EmptyNode
        >>> EmptyNode() == EmptyNode(), jax.tree_util.tree_leaves(EmptyNode())
        (True, [])
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # equal to all of its kind, never a key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmptyNode)

    def __repr__(self) -> str:
        return "EmptyNode"


jax.tree_util.register_pytree_node(  # type: ignore  # jax says nothing of its keys
    EmptyNode, lambda node: ((), None), lambda aux, children: EmptyNode()
)


array_types: set[type] = set()  # jax's array types, added when first seen


def is_array(value: object) -> TypeGuard[Array]:
    """True for jax arrays, tracers, typed keys, and numpy arrays of numbers; others are static."""
    if type(value) in array_types:
        return True
    if isinstance(value, np.ndarray):
        return is_number_array(value)  # type: ignore  # of any dtype
    if not isinstance(value, jax.Array):
        return False
    if not is_tracer(value):  # whether a tracer is an array depends on its value
        array_types.add(type(value))
    return True


def is_floating(value: object) -> TypeGuard[Array]:
    """True for arrays of floating-point numbers."""
    return is_array(value) and jax.numpy.issubdtype(value.dtype, jax.numpy.floating)


def is_node_or_empty(value: object) -> TypeGuard[Node | EmptyNode]:
    """True where the look at one module's attributes stops."""
    return isinstance(value, (Node, EmptyNode))


def is_node(value: object) -> TypeGuard[Node]:
    """True for modules."""
    return isinstance(value, Node)


_LISTS = frozenset({list, tuple})
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, type})


def is_iterator(value: object) -> bool:
    """True for Python's iterators and views of dicts, which jax takes for leaves, and warns of."""
    own = type(value).__module__ in ("builtins", "itertools")
    return own and isinstance(value, (Iterator, MappingView))


def kind_of(value: object) -> str:
    """``ARRAYS``, ``MIXED`` or ``STATIC``: whether all, some or no leaves are arrays or nodes."""
    if type(value) in _PLAIN_TYPES:
        return STATIC
    if isinstance(value, (Node, EmptyNode)) or is_array(value):
        return ARRAYS
    if type(value) in _LISTS and is_sequence(value) and value and all(map(is_node, value)):
        return ARRAYS  # as layers are usually kept
    if is_iterator(value):
        return STATIC
    leaves = leaves_of_attribute(value)
    dynamic = sum(is_array(x) or is_node_or_empty(x) for x in leaves)
    if dynamic == 0:
        return STATIC
    return ARRAYS if dynamic == len(leaves) else MIXED


def leaves_of_attribute(value: object) -> list[Any]:
    """The leaves of an attribute, with nodes as leaves; none of a dict with unsortable keys.

    Raises:
        InvalidArgumentError: a container contains itself, or more than 100 in one another.
    """
    if not ends(value):
        raise cycle_error(value)
    try:
        return jax.tree_util.tree_leaves(value, is_leaf=is_node_or_empty)
    except (TypeError, ValueError):
        return []


def cycle_error(value: object) -> InvalidArgumentError:
    """Returns the error for a value that contains itself, or nests too deeply."""
    return InvalidArgumentError(
        f"An attribute of a module contains itself, or more than {MAX_DEPTH} containers, "
        "one in another.",
        got=f"a {type(value).__name__} that nests deeper, or without end",
        write="a list without itself in it; an object of a class of your own may refer to itself",
    )


# --- from attributes to (children, moduledef) -----------------------------------


def attributes_of(node: Node) -> dict[str, Any]:
    """The instance dict of a module, filled; changing it needs `update_moduledef` after."""
    attributes = attributes_now(node)
    if not attributes:
        fill_node(node)
    return attributes


def _find_kinds(node: Node, known: Mapping[str, str]) -> dict[str, str]:
    """Classifies each attribute; those in `known` are inspected only if no longer mixed."""
    kinds: dict[str, str] = {}
    for name, value in attributes_of(node).items():
        kind = known.get(name)
        try:
            if kind is None or (kind is MIXED and not shows_static_leaves(value)):
                kind = kind_of(value)
            kinds[name] = kind
        except InvalidArgumentError as error:
            error.where = f"{type(node).__qualname__}.{name}"
            raise
    return kinds


def owner_of(node: Node) -> Any:
    """The `MutationScope` that has this module open, or None; see `is_open`."""
    owner = node._pax_owner
    return None if owner is None or owner.closed else owner


def update_moduledef(node: Node, kinds: Mapping[str, str] | None = None) -> None:
    """Brings a module's moduledef up to date; attributes not in `kinds` are looked at.

    That of an open module is made when it is next needed. The containers of a closed one become
    read-only.
    """
    found = _find_kinds(node, kinds or {})
    set_kinds(node, found)
    drop_flat(node)
    if owner_of(node) is not None:
        return
    attributes = attributes_of(node)
    try:
        own = {n: copy_containers(attributes[n]) for n in found if has_container(attributes[n])}
    except RecursionError:
        raise cycle_error(list(attributes.values())) from None
    attributes.update(own)
    pair = _make_pair(node, found, attributes)
    changing = pair[1].changing
    attributes.update({n: read_only(value) for n, value in own.items() if n not in changing})
    if not changing:
        set_flat(node, pair)
        set_kinds(node, None)


def _make_pair(
    node: Node, kinds: Mapping[str, str], attributes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], ModuleDef]:
    moduledef = _make_moduledef(node, kinds)
    children = [attributes[name] for name in moduledef.names]
    for index in range(moduledef.array_count, len(children)):
        children[index] = _wrap_static_leaves(children[index])
    return tuple(children), moduledef


def _flatten_now(node: Node) -> tuple[tuple[Any, ...], ModuleDef]:
    """The pair of a module that is open, or whose static data may change in place."""
    kinds, attributes = _kinds_now(node), attributes_now(node)
    own = {name: copy_containers(value) for name, value in attributes.items()}
    pair = _make_pair(node, kinds, own)
    may_keep = node._pax_kinds is not None and not pair[1].changing
    if may_keep and not any(map(has_container, attributes.values())):
        set_flat(node, pair)
        set_kinds(node, None)
    return pair


def _kinds_now(node: Node) -> dict[str, str]:
    """The kinds of the attributes of an open module, whose containers may have changed."""
    attributes, known = attributes_of(node), node._pax_kinds or {}
    containers = {name for name in known if has_container(attributes.get(name))}
    same = {n: kind for n, kind in known.items() if n not in containers or kind is MIXED}
    found = _find_kinds(node, same)
    for name in containers:  # an empty container stays a subtree
        if known[name] is ARRAYS and found[name] is STATIC:
            found[name] = ARRAYS
    return found


def _make_moduledef(node: Node, kinds: Mapping[str, str]) -> ModuleDef:
    attributes = attributes_now(node)
    arrays = tuple(name for name, kind in kinds.items() if kind is ARRAYS)
    mixed = tuple(name for name, kind in kinds.items() if kind is MIXED)
    static = {n: attributes[n] for n, kind in kinds.items() if kind is STATIC}
    try:
        return intern_moduledef(type(node), tuple(attributes), arrays, mixed, static)
    except RecursionError:
        raise cycle_error(static) from None


def drop_flat(node: Node) -> None:
    """Drops the pair for jax, which is out of date."""
    try:
        _delete_flat(node)
    except AttributeError:
        pass


def current_kinds(node: Node) -> dict[str, str]:
    """The kinds of attributes, without those of static containers in an open module."""
    return _kinds_of(flatten(node)[1]) if node._pax_kinds is None else _kinds_now(node)


def _kinds_of(moduledef: ModuleDef) -> dict[str, str]:
    kinds = dict.fromkeys(moduledef.names[: moduledef.array_count], ARRAYS)
    kinds |= dict.fromkeys(moduledef.names[moduledef.array_count :], MIXED)
    return kinds | dict.fromkeys(moduledef.static, STATIC)


def thaw(node: Node) -> None:
    """Makes the containers of a module that was opened plain ones of its own."""
    attributes = attributes_now(node)
    own = {n: copy_containers(value) for n, value in attributes.items() if has_container(value)}
    if own:
        kinds = current_kinds(node)
        attributes.update(own)
        set_kinds(node, kinds)
        drop_flat(node)


# --- containers with arrays and static values ----------------------------------


def _wrap_static_leaves(value: T) -> T:
    """Wraps the values of a mixed container that are not arrays in nodes without leaves."""
    if shows_static_leaves(value):
        return value

    def wrapped(leaf: object) -> object:
        return leaf if is_array(leaf) or is_node_or_empty(leaf) else StaticLeaf(leaf)

    return jax.tree_util.tree_map(wrapped, value, is_leaf=is_node_or_empty)


def _unwrap_static_leaves(value: T) -> T:
    leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=_is_node_or_static_leaf)
    others = [x for x in leaves if not isinstance(x, StaticLeaf)]
    if not others or not all(is_array(x) or is_node_or_empty(x) for x in others):
        # In a tree of masks or shapes, or with None for every array, only the wrapping tells
        # which leaves are static: there it stays.
        return value
    values = [x.value if isinstance(x, StaticLeaf) else x for x in leaves]
    return jax.tree_util.tree_unflatten(treedef, values)


def _is_node_or_static_leaf(value: object) -> bool:
    return isinstance(value, (Node, StaticLeaf))


def shows_static_leaves(value: object) -> bool:
    """True if a static leaf of a container is still wrapped."""
    if not ends(value):
        raise cycle_error(value)
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_node_or_static_leaf)
    return any(isinstance(leaf, StaticLeaf) for leaf in leaves)


# --- from (children, moduledef) back to a module --------------------------------


def unflatten(moduledef: ModuleDef, children: Iterable[Any], /) -> Any:
    """Makes a module of a moduledef and its children; never runs a constructor."""
    node = _object_new(moduledef.cls)
    if moduledef.lazy:
        set_flat(node, (children, moduledef))
        return node
    children = tuple(children)
    attributes_now(node).update(_attributes_in(moduledef, children))
    if moduledef.changing:
        set_kinds(node, _kinds_of(moduledef))
    else:
        set_flat(node, (children, moduledef))
    return node


def _attributes_in(moduledef: ModuleDef, children: Iterable[Any]) -> dict[str, Any]:
    """The attributes of a closed module."""
    attributes = dict(moduledef.template)
    for name in moduledef.changing:
        attributes[name] = copy_containers(attributes[name])
    count = moduledef.array_count
    for number, (name, value) in enumerate(zip(moduledef.names, children)):
        attributes[name] = read_only(value if number < count else _unwrap_static_leaves(value))
    return attributes


def from_folded(pair: tuple[tuple[list[Any]], TreeDef]) -> Any:
    """The module of ``((leaves,), treedef)``, made at first access."""
    (leaves,), treedef = pair
    cls, moduledef = treedef.node_data()
    if not moduledef.lazy:
        return treedef.unflatten(leaves)
    node = _object_new(cls)
    set_folded(node, pair)
    return node


def unfold_node(node: Node) -> bool:
    """Unflattens a folded module; returns False if it was not folded."""
    pair = node._pax_folded
    if pair is None:
        return False
    (leaves,), treedef = pair
    set_flat(node, flatten(treedef.unflatten(leaves)))
    set_folded(node, None)  # last: another thread finds one or the other
    return True


def fill_node(node: Node) -> bool:
    """Fills in the attributes of a rebuilt module; False if that was done before."""
    attributes = attributes_now(node)
    if attributes:
        return False
    unfold_node(node)
    try:
        children, moduledef = _get_flat(node)
    except AttributeError:
        return False  # still before its constructor
    # One update, so that other threads never see a partial one.
    attributes.update(_attributes_in(moduledef, children))
    if owner_of(node) is not None:
        thaw(node)
    return True


def _flatten_with_keys(node: Node) -> tuple[tuple[Any, ...], ModuleDef]:
    children, moduledef = flatten(node)
    return tuple(zip(moduledef.keys, children)), moduledef


def register_class(cls: type) -> None:
    """Registers a class of modules with jax."""
    jax.tree_util.register_pytree_with_keys(  # type: ignore  # jax says nothing of its keys
        cls, _flatten_with_keys, unflatten, flatten_func=flatten
    )
