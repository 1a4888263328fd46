"""Modules as pytrees: kinds of attributes, flatten and unflatten. The hot path of the library.

* ``(children, moduledef)`` is kept on the instance, so flatten is one attribute read.
* A `ModuleDef` has everything about a module but its children, and is interned.
* A rebuilt module has that pair only; attributes are filled in when they are first read.

docs/decisions/flatten.md has the measurements.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export._jax import is_tracer
from pax_export._types import PyTree
from pax_export.core._containers import copy_containers, has_container
from pax_export.core._moduledef import ModuleDef, intern_moduledef
from pax_export.core._mutation_detection import (
    MAX_DEPTH,
    Watched,
    ends,
    find_changed,
    holds_container,
    is_unchanged,
    seen_in,
    warn_of_change,
    with_watch,
)
from pax_export.core._static import StaticLeaf, static_key

ARRAYS, MIXED, STATIC = "arrays", "mixed", "static"

_object_new = object.__new__


class Node:
    """The base class of modules: stores attributes and knows nothing of modules.

    It has a plain metaclass, so that ``isinstance(x, Node)`` stays a fast check
    in C, whatever the metaclass of `Module` is.

    Slots:
        _pax_flat: ``(children, moduledef)``; absent while a container among the
            attributes may still change what is a subtree.
        _pax_moduledef: the last moduledef, kept only while `_pax_flat` is absent.
        _pax_kinds: what each attribute is, of an open module whose moduledef is made
            when it is next needed (see `_mutable.py`).
        _pax_seen: the contents of the containers when last checked, while `_pax_flat` is absent
            (see `_mutation_detection.py`); a stored pair includes them.
        _pax_owner: the scope that may change this module (see `_mutable.py`).
        _pax_folded: ``((leaves,), treedef)`` of a module not accessed
            since a jitted function returned it (see `transforms/_jit.py`).
    """

    __slots__ = (
        "_pax_flat", "_pax_folded", "_pax_kinds", "_pax_moduledef", "_pax_owner", "_pax_seen",
        "__dict__", "__weakref__",
    )  # fmt: skip

    # Attributes of a class that are random keys of the legacy kind, uint32.
    rng_attributes: ClassVar[tuple[str, ...]] = ()
    # When a call changes the state of the module itself: "in train mode", "always"; "" is unknown.
    _pax_changes: ClassVar[str] = ""

    def __getattr__(self, name: str) -> Any:
        """Handles what normal lookup misses: the slots, and attributes not filled in yet."""
        if name == "_pax_flat":
            made = unfold_node(self) or update_if_changed(self)
            return self._pax_flat if made else _flatten_afresh(self)
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
_set_moduledef = Node.__dict__["_pax_moduledef"].__set__
_set_seen = Node.__dict__["_pax_seen"].__set__
set_folded = Node.__dict__["_pax_folded"].__set__
set_owner = Node.__dict__["_pax_owner"].__set__


def flatten(node: Node) -> tuple[tuple, ModuleDef]:
    """Returns the pair for jax; raises if containers of a closed module were changed outside."""
    kept = node._pax_flat
    if type(kept) is not Watched:
        return kept
    return kept.pair if is_unchanged(kept.seen) else _look_again(node, kept)


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


jax.tree_util.register_pytree_node(
    EmptyNode, lambda node: ((), None), lambda aux, children: EmptyNode()
)


array_types: set[type] = set()  # jax's array types, added when first seen


def is_array(value: object) -> bool:
    """True for jax arrays, tracers, typed keys, and numpy arrays of numbers; others are static."""
    if type(value) in array_types:
        return True
    if isinstance(value, np.ndarray):
        return _has_numbers(value.dtype)
    if not isinstance(value, jax.Array):
        return False
    if not is_tracer(value):  # whether a tracer is an array depends on its value
        array_types.add(type(value))
    return True


def _has_numbers(dtype: np.dtype) -> bool:
    # numpy reports the small floats and integers of ml_dtypes as kind "V", like records.
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def is_node_or_empty(value: object) -> bool:
    """True where the look at one module's attributes stops."""
    return isinstance(value, (Node, EmptyNode))


def is_node(value: object) -> bool:
    """True for modules."""
    return isinstance(value, Node)


#: An iterator may hold layers, and loses them when it is used; jax has no tree of it.
ITERATORS = (types.GeneratorType, map, filter, zip)
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, type, *ITERATORS})


def kind_of(value: object) -> str:
    """``ARRAYS``, ``MIXED`` or ``STATIC``: whether all, some or no leaves are arrays or nodes."""
    if type(value) in _PLAIN_TYPES:
        return STATIC
    if isinstance(value, (Node, EmptyNode)) or is_array(value):
        return ARRAYS
    if type(value) is list and value and all(map(is_node, value)):  # as layers are kept
        return ARRAYS
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
    """Classifies each attribute; those in `known` are not inspected."""
    kinds: dict[str, str] = {}
    for name, value in attributes_of(node).items():
        try:
            kinds[name] = known.get(name) or kind_of(value)
        except InvalidArgumentError as error:
            error.where = f"{type(node).__qualname__}.{name}"
            raise
    return kinds


def update_moduledef(node: Node, kinds: Mapping[str, str] | None = None) -> None:
    """Brings a module's moduledef up to date; attributes not in `kinds` are looked at."""
    attributes = attributes_of(node)
    moduledef = _make_moduledef(node, _find_kinds(node, kinds or {}))
    set_kinds(node, None)
    subtrees = [attributes[n] for n in moduledef.names]
    if moduledef.uncached:
        drop_flat(node)
        _set_moduledef(node, moduledef)
        _note_content(node, moduledef, subtrees)
    else:
        set_flat(node, with_watch((tuple(subtrees), moduledef)))
        _set_moduledef(node, None)


def update_if_changed(node: Node) -> bool:
    """Updates the moduledef if attributes were set since; False if none was."""
    kinds = node._pax_kinds
    if kinds is None:
        return False
    update_moduledef(node, kinds)
    return True


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
    """The kinds of attributes in the moduledef, without static containers: these may change."""
    moduledef, _ = known_moduledef(node)
    kinds = dict.fromkeys(moduledef.names[: moduledef.array_count], ARRAYS)
    kinds |= dict.fromkeys(moduledef.names[moduledef.array_count :], MIXED)
    static = [n for n, v in moduledef.static.items() if not has_container(v)]
    return kinds | dict.fromkeys(static, STATIC)


def known_moduledef(node: Node) -> tuple[ModuleDef, Iterable]:
    """Returns the moduledef without inspecting containers, and the current subtrees."""
    update_if_changed(node)
    pair = _kept_flat(node)
    if pair is not None:
        return pair[1], pair[0]
    attributes, moduledef = attributes_of(node), node._pax_moduledef
    return moduledef, [attributes[name] for name in moduledef.names]


# --- containers that were changed in place -------------------------------------


def _note_content(node: Node, moduledef: ModuleDef, subtrees: list[Any]) -> None:
    """Records the contents of the containers of a module that stores no pair."""
    _set_seen(node, (seen_in(subtrees), _leaves_key(moduledef, subtrees)))


def _leaves_key(moduledef: ModuleDef, subtrees: list[Any]) -> Any:
    """Returns the key of the mutable static leaves in mixed containers."""
    mixed = subtrees[moduledef.array_count :]
    return static_key([_changing_leaves(value) for value in mixed]) if mixed else None


def _changing_leaves(value: object) -> list[Any]:
    """The sets, deques and the like in a mixed container."""
    leaves = jax.tree_util.tree_leaves(value, is_leaf=is_node_or_empty)
    return [leaf for leaf in leaves if not is_array(leaf) and has_container(leaf)]


def is_as_seen(node: Node) -> bool:
    """Returns whether every container of a module has the contents it had when last checked."""
    kept = _kept_slot(node)
    if kept is not None:
        # A pair that replaced another one in an open module has no record.
        return is_unchanged(kept.seen) if type(kept) is Watched else not seen_in(kept[0])
    moduledef, seen, attributes = node._pax_moduledef, node._pax_seen, attributes_of(node)
    if seen is None or not is_unchanged(seen[0]):
        return False
    subtrees = [attributes[name] for name in moduledef.names]
    return seen[1] == _leaves_key(moduledef, subtrees) and all(
        static_key(attributes[name]) == static_key(moduledef.static[name])
        for name in moduledef.containers
    )


def watch_again(node: Node) -> None:
    """Records the contents of the containers of a module that is being closed."""
    pair = _kept_flat(node)
    if pair is None:
        update_moduledef(node, current_kinds(node))
    else:
        set_flat(node, with_watch(pair))


def _is_open(node: Node) -> bool:
    owner = node._pax_owner
    return owner is not None and not owner.closed


def _look_again(node: Node, kept: Watched) -> tuple[tuple, ModuleDef]:
    """The pair of a module in which a container was changed; warns if that was outside."""
    found = find_changed(kept.seen)
    if found and not _is_open(node):
        (children, moduledef), (container, _) = kept.pair, found
        name = next(
            (n for n, x in zip(moduledef.names, children) if holds_container(x, container)), ""
        )
        kinds = current_kinds(node)
        now = _find_kinds(node, {n: kind for n, kind in kinds.items() if n != name})
        kinds[name] = MIXED if now[name] is MIXED else ARRAYS
        warn_of_change(type(node), name, container)
        update_moduledef(node, kinds)
        return _kept_flat(node) or node._pax_flat
    return kept.pair


def _compare_contents(node: Node, moduledef: ModuleDef, subtrees: list[Any]) -> None:
    """Warns if a closed module that keeps no pair differs from its last look."""
    before, seen = node._pax_moduledef, node._pax_seen
    if before is not None and seen is not None:
        same = before is moduledef or before == moduledef
        found = None if is_unchanged(seen[0]) else find_changed(seen[0])
        leaves_differ = before.names == moduledef.names and seen[1] != _leaves_key(
            moduledef, subtrees
        )
        if same and found is None and not leaves_differ:
            return
        name = _changed_name(node, before, moduledef, found, leaves_differ)
        if name is not None and not _is_open(node):
            warn_of_change(type(node), name, attributes_of(node)[name])
    _set_moduledef(node, moduledef)
    _note_content(node, moduledef, subtrees)


def _changed_name(
    node: Node, before: ModuleDef, now: ModuleDef, found: PyTree, leaves_differ: bool
) -> str | None:
    """The attribute that was changed in place; None if the module is only seen otherwise now."""
    if found is not None:
        attributes = attributes_of(node)
        return next((n for n in now.template if holds_container(attributes[n], found[0])), None)
    for name in before.containers:
        old = static_key(before.static[name])
        if name not in now.static or old != static_key(now.static[name]):
            return name
    return now.names[-1] if leaves_differ else None


def _flatten_afresh(node: Node) -> tuple[tuple, ModuleDef]:
    """Flattens a module whose containers may have changed since its last moduledef."""
    attributes = attributes_of(node)
    known = current_kinds(node) if node._pax_moduledef is not None else {}
    for name in [n for n, kind in known.items() if kind is MIXED]:
        if not shows_static_leaves(attributes[name]):
            del known[name]
    kinds = _find_kinds(node, known)
    moduledef = _make_moduledef(node, kinds)
    children = [attributes[name] for name in moduledef.names]
    _compare_contents(node, moduledef, children)
    for index in range(moduledef.array_count, len(children)):
        children[index] = _wrap_static_leaves(children[index])
    return tuple(children), moduledef


def _wrap_static_leaves(value: object) -> object:
    """Wraps the values of a mixed container that are not arrays in nodes without leaves."""
    if shows_static_leaves(value):
        return value
    return jax.tree_util.tree_map(
        lambda x: x if is_array(x) or is_node_or_empty(x) else StaticLeaf(x),
        value,
        is_leaf=is_node_or_empty,
    )


def _unwrap_static_leaves(value: object) -> object:
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_node_or_static_leaf)
    others = [x for x in leaves if not isinstance(x, StaticLeaf)]
    if not others or not all(is_array(x) or is_node_or_empty(x) for x in others):
        # In a tree of masks or shapes, or with None for every array, only the wrapping tells
        # which leaves are static: there it stays.
        return value
    return jax.tree_util.tree_map(
        lambda x: x.value if isinstance(x, StaticLeaf) else x,
        value,
        is_leaf=_is_node_or_static_leaf,
    )


def _is_node_or_static_leaf(value: object) -> bool:
    return isinstance(value, (Node, StaticLeaf))


def shows_static_leaves(value: object) -> bool:
    """True if a static leaf of a container is still wrapped."""
    if not ends(value):
        raise cycle_error(value)
    leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_node_or_static_leaf)
    return any(isinstance(leaf, StaticLeaf) for leaf in leaves)


# --- from (children, moduledef) back to a module --------------------------------


def unflatten(moduledef: ModuleDef, children: Iterable, /) -> Any:
    """Makes a module of a moduledef and its children; never runs a constructor."""
    node = _object_new(moduledef.cls)
    if moduledef.lazy:
        set_flat(node, (children, moduledef))
    else:
        _fill_attributes(node, moduledef, tuple(children))
    return node


def _fill_attributes(node: Node, moduledef: ModuleDef, children: tuple) -> None:
    """Gives a new object its attributes at once."""
    if moduledef.uncached:
        _set_moduledef(node, moduledef)
    attributes = attributes_now(node)
    attributes.update(moduledef.template)
    for name in moduledef.containers:
        attributes[name] = copy_containers(attributes[name])
    attributes.update(zip(moduledef.names, children))
    for name in moduledef.names[moduledef.array_count :]:
        attributes[name] = _unwrap_static_leaves(attributes[name])
    if moduledef.uncached:
        _note_content(node, moduledef, [attributes[name] for name in moduledef.names])
    else:
        set_flat(node, with_watch((children, moduledef)))


def from_folded(pair: tuple[tuple[Any], Any]) -> Any:
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


def _kept_slot(node: Node) -> tuple | None:
    """Returns the slot's value, the pair for jax or a `Watched`, filling it if possible."""
    for _ in range(2):
        try:
            return _get_flat(node)
        except AttributeError:
            unfold_node(node)
    return None


def _kept_flat(node: Node) -> tuple[tuple, ModuleDef] | None:
    """The pair for jax if it is kept, or can be made from a folded module."""
    kept = _kept_slot(node)
    return kept.pair if type(kept) is Watched else kept  # type: ignore[return-value]


def fill_node(node: Node) -> bool:
    """Fills in the attributes of a rebuilt module; False if that was done before."""
    attributes = attributes_now(node)
    if attributes:
        return False
    kept = _kept_slot(node)
    if kept is None:
        return False  # still before its constructor
    children, moduledef = kept.pair if type(kept) is Watched else kept
    if type(kept) is not Watched and (seen := seen_in(children)):
        set_flat(node, Watched(kept, seen))  # before a container can be referenced
    # One update, so that other threads never see a partial one.
    attributes.update({**moduledef.template, **dict(zip(moduledef.names, children))})
    return True


def _flatten_with_keys(node: Node) -> tuple[tuple, ModuleDef]:
    children, moduledef = flatten(node)
    return tuple(zip(moduledef.keys, children)), moduledef


def register_class(cls: type) -> None:
    """Registers a class of modules with jax."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_with_keys, unflatten, flatten_func=flatten
    )
