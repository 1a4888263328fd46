"""Selects trainable leaves, and merges trees with empty nodes.

A `Kept` describes ``parameters()`` of a class, and `Frozen` what of it a module leaves out. Both
are in the treedef, so the result for a tree is replayed (see `cached_by_treedef`); a class's own
``parameters`` method is called.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from pax_export._foundations.errors import (
    InvalidArgumentError,
    StructureMismatchError,
    UntrainedArrayWarning,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core._check import structure_differences
from pax_export.core._static import base_of
from pax_export.core._traversal import (
    apply_bottom_up,
    cached_by_treedef,
    flatten_with_path,
    fold_bottom_up,
    join_path,
    map_attributes,
    named_leaves,
    named_modules,
    one_level,
    path_name,
    submodules,
)
from pax_export.core._tree import (
    EmptyNode,
    Node,
    attributes_of,
    flatten,
    is_array,
    is_node,
    is_node_or_empty,
    unflatten,
)

#: Whether this thread traces a loss to differentiate it: parameters made now get no gradients.
differentiating: ContextVar[bool] = ContextVar("pax_export_differentiating", default=False)


M = TypeVar("M", bound=Node)
T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """Describes which leaves ``parameters()`` of a class keeps."""

    names: tuple[str, ...] | None  # attributes whose arrays are kept; None: all
    submodules: bool = True  # whether parameters of submodules are kept
    declared: bool = True  # False for a plain `Module`

    def keeps(self, name: str) -> bool:
        return self.names is None or name in self.names


NOTHING = Kept(names=())
UNDECLARED = Kept(names=(), declared=False)
EVERYTHING = Kept(names=None)


@dataclass(frozen=True)
class Frozen:
    """Which of its own arrays a module keeps from being trained: a static attribute of it."""

    whole: bool = False  # all of them, also those that it gets later
    paths: frozenset[str] = frozenset()  # some of them, from the module
    statistics: bool = False  # the module stays in eval mode
    #: Adapters train instead of the module, and this much of it was frozen without them.
    before_adapters: frozenset[str] | None = None


#: The attribute is absent while nothing is frozen, so unfreezing gives the treedef of before.
FROZEN_ATTRIBUTE = "_frozen"
_NOT_FROZEN = Frozen()


def frozen_of(module: Node) -> Frozen:
    """What of a module's own arrays is frozen."""
    return attributes_of(module).get(FROZEN_ATTRIBUTE, _NOT_FROZEN)


def with_frozen(module: M, frozen: Frozen) -> M:
    """The module with exactly this of its own arrays frozen."""
    children, moduledef = flatten(module)
    static = {n: value for n, value in moduledef.static.items() if n != FROZEN_ATTRIBUTE}
    if frozen != _NOT_FROZEN:
        static[FROZEN_ATTRIBUTE] = frozen
    return unflatten(moduledef.derived(moduledef.cls, static), children)


def method_for(choice: Kept) -> Callable[[Any], Any]:
    """Makes the method ``parameters`` of a class."""

    def parameters(self: M) -> M:
        """Returns the module with an EmptyNode for every array not trained."""
        if _declared_kept(type(self)) is choice:
            return _select_kept(self)
        return _keep_parameters(self, choice)  # called by an override, through super()

    parameters.kept = choice  # type: ignore[attr-defined]
    return parameters


def parameters_method(*names: str, submodules: bool = True) -> Callable[[Any], Any]:
    """Makes a method ``parameters`` that keeps the named attributes.

    Args:
        *names: attribute names; a string may hold several, separated by blanks.
            An attribute may be None.  Without names no array of its own is trained.
        submodules: whether the parameters of submodules are kept as well.

    Returns:
        A method for a class body.

    Raises:
        InvalidArgumentError: (an AssertionError too, when the method is called)
            the module lacks a named attribute.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> class Scale(pax.Module):
        ...     parameters = pax.parameters_method("scale")
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale, self.count = jnp.ones(3), jnp.zeros(())
        >>> Scale().parameters().count
        EmptyNode
    """
    split = tuple([name for text in names for name in text.split()])
    return method_for(Kept(split, submodules))


def respecting_frozen(written: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A class's own method ``parameters``, of whose result frozen arrays are left out."""
    if hasattr(written, "kept"):
        return written

    def parameters(self: Node) -> Any:
        frozen = frozen_of(self)
        if frozen.whole:
            return _select_kept(self)
        result: Node = written.__get__(self, type(self))()
        if not frozen.paths:
            return result
        return map_attributes(result, functools.partial(_with_holes_at, paths=frozen.paths))

    return functools.update_wrapper(parameters, written)


def kept_by(module: Node) -> Kept | None:
    """The attributes that a module keeps as parameters; None if its class computes them."""
    return NOTHING if frozen_of(module).whole else _declared_kept(type(module))


def _declared_kept(cls: type) -> Kept | None:
    return getattr(getattr(cls, "parameters", None), "kept", None)


@cached_by_treedef(runs_foreign_code=lambda module: kept_by(module) is None)
def _select_kept(module: Node) -> Any:
    return _keep_parameters(module, kept_by(module))


def _keep_parameters(module: Node, of_root: Kept | None) -> Any:
    """Returns ``parameters()`` for a tree whose root keeps these attributes."""

    def kept(each: Node) -> Kept | None:
        return of_root if each is module else kept_by(each)

    def below(each: Node) -> list[Any]:
        found = kept(each)
        return [] if found is None else _looked_into(found, each)

    def build(each: Node, parts: Iterator[Any]) -> Any:
        found = kept(each)
        return each.parameters() if found is None else _with_holes(found, each, parts)

    return fold_bottom_up(module, build, below)


def _looked_into(choice: Kept, module: Node) -> list[Any]:
    """Returns the submodules whose parameters are kept."""
    _require_attributes(module, choice)
    if choice.submodules:
        return submodules(module)
    children, moduledef = flatten(module)
    own = [child for name, child in zip(moduledef.names, children) if choice.keeps(name)]
    items = jax.tree_util.tree_leaves(own, is_leaf=is_node)
    return [item for item in items if is_node(item)]


def _with_holes(choice: Kept, module: Node, parts: Iterator[Any]) -> Any:
    """Returns one module with empty nodes for dropped leaves; `parts` replace its submodules."""
    frozen = frozen_of(module).paths

    def keep(name: str, subtree: T) -> T:
        keeps = choice.keeps(name)

        def leaf(x: Node | ArrayLike) -> Any:
            if not is_node(x):
                return x if keeps else EmptyNode()
            return next(parts) if keeps or choice.submodules else EmptyNode()

        found = jax.tree_util.tree_map(leaf, subtree, is_leaf=is_node)
        return _with_holes_at(name, found, frozen) if frozen else found

    return map_attributes(module, keep)


def _with_holes_at(name: str, subtree: T, paths: frozenset[str]) -> T:
    """Returns the subtree of an attribute with empty nodes for its own arrays at these paths."""
    items, treedef = flatten_with_path(subtree, is_leaf=is_node)
    left = [
        EmptyNode() if not is_node(x) and path_name((DictKey(name), *path)) in paths else x
        for path, x in items
    ]
    return jax.tree_util.tree_unflatten(treedef, left)


def _require_attributes(module: Node, choice: Kept) -> None:
    moduledef = flatten(module)[1]
    missing = [n for n in choice.names or () if n not in moduledef.template]
    if missing:
        raise InvalidArgumentError(
            "parameters_method names an attribute that the module does not have.",
            where=f"{type(module).__qualname__}.{missing[0]}",
            got=f"the attributes {', '.join(moduledef.template)}",
            write="the name of an attribute, or None assigned to it in __init__",
        )


# --- undeclared arrays ---------------------------------------------------------------

# Of each class: the attributes that a warning has named.
_warned: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def warn_of_untrained(model: Node) -> None:
    """Warns once per class whose floating arrays are not trained, unless the class declares it."""
    for module in _undeclared_modules(model):
        cls = base_of(type(module))
        named = _warned.setdefault(cls, set())
        names = [name for name in _untrained_attributes(module) if name not in named]
        if names:
            named.update(names)
            _warn_of_untrained(model, module, names)


def _undeclared_modules(model: Node) -> list[Node]:
    """The modules that do not declare which of their arrays are trained, nor do their parents."""
    found: list[Node] = []
    left = [model]
    while left:
        module = left.pop()
        choice = kept_by(module)
        if choice is not None:
            left += reversed(_looked_into(choice, module))
            found += [module] if not choice.declared else []
    return found


def _untrained_attributes(module: Node) -> list[str]:
    """The attributes with undeclared floating arrays of the module itself."""
    children, moduledef = flatten(module)
    frozen = frozen_of(module).paths

    def has_floats(name: str, child: PyTree) -> bool:
        if is_node(child):
            return False
        items, _ = flatten_with_path(child, is_leaf=is_node_or_empty)
        return any(
            is_array(x)
            and jnp.issubdtype(x.dtype, jnp.inexact)
            and path_name((DictKey(name), *path)) not in frozen
            for path, x in items
        )

    return [name for name, child in zip(moduledef.names, children) if has_floats(name, child)]


def _warn_of_untrained(model: Node, module: Node, names: list[str]) -> None:
    cls = base_of(type(module)).__qualname__
    owner_path = next(path for path, each in named_modules(model) if each is module)
    arrays = ", ".join(join_path(owner_path, name) for name in names)
    listed = " ".join(names)
    warning = UntrainedArrayWarning(
        f"{arrays}: not trained, because {cls} is a plain Module.",
        where=f"{type(model).__qualname__}: {arrays}",
        got=f"class {cls}, which declares neither parameters nor state",
        write=f"class {cls}(pax.ParameterModule), or in its body "
        f'parameters = pax.parameters_method("{listed}"), to train; class {cls}(pax.StateModule), '
        "or parameters = pax.parameters_method(), if it is a constant or state",
    )
    warnings.warn(warning, stacklevel=4)


# --- frozen modules -------------------------------------------------------------------


def freeze_alone(module: M, states: bool) -> M:
    """Freezes the arrays of a module, but not of its submodules."""
    keeps = states or frozen_of(module).statistics
    new = with_frozen(module, Frozen(whole=True, statistics=keeps))
    return new._with_training(False) if keeps else new


def freeze_arrays(module: M, paths: frozenset[str]) -> M:
    """Freezes some of a module's own arrays, too."""
    return with_frozen(module, _with_paths(frozen_of(module), lambda own: own | paths))


def unfreeze_alone(module: M) -> M:
    """Unfreezes the arrays of a module, but not of its submodules."""
    return module if frozen_of(module) == _NOT_FROZEN else with_frozen(module, _NOT_FROZEN)


def unfreeze_arrays(module: M, paths: frozenset[str]) -> M:
    """Unfreezes some of a module's own arrays; of one frozen whole, the others stay frozen."""
    frozen = frozen_of(module)
    if frozen.whole:
        frozen = replace(frozen, whole=False, paths=frozenset(_own_arrays(module)))
    return with_frozen(module, _with_paths(frozen, lambda own: own - paths))


def _with_paths(frozen: Frozen, change: Callable[[frozenset[str]], frozenset[str]]) -> Frozen:
    """Changes what is frozen, and what will be when adapters are removed."""
    before = frozen.before_adapters
    after = None if before is None else change(before)
    return replace(frozen, paths=change(frozen.paths), before_adapters=after)


def _own_arrays(module: Node) -> list[str]:
    """The paths of a module's own arrays."""
    children, moduledef = flatten(module)
    items, _ = flatten_with_path(dict(zip(moduledef.names, children)), is_leaf=is_node)
    return [path_name(path) for path, x in items if not is_node(x)]


def unfreeze_like(module: Node, origin: M) -> M:
    """The leaves of a frozen module in the tree of the module before it was frozen."""
    pairs = zip_longest(
        map(_path_and_shape, named_leaves(module)),
        map(_path_and_shape, named_leaves(origin)),
        fillvalue="nothing",
    )
    for own, before in pairs:
        if own != before:
            raise InvalidArgumentError(
                "unfreeze_parameters needs the module that was frozen as its origin.",
                where=own.partition(" ")[0],
                got=f"{own} where the origin has {before}",
                write="unfreeze the part that was frozen, and then exchange layers; or make the "
                "same exchange in the origin: origin=net.replace(...)",
            )
    structure = jax.tree_util.tree_structure(origin)
    return jax.tree_util.tree_unflatten(structure, jax.tree_util.tree_leaves(module))


def _path_and_shape(named: tuple[str, Any]) -> str:
    return f"{named[0]} {getattr(named[1], 'shape', '')}"


# --- roles ------------------------------------------------------------------------------

#: A module has the first of these roles that any of its arrays has.
ROLES = TRAINABLE, FROZEN, STATE = "trainable", "frozen", "state"


def named_roles(module: Node) -> list[tuple[str, Any, str]]:
    """The path, the leaf and the role of every leaf, in tree order."""
    frozen = _frozen_paths(module)
    unfrozen = apply_bottom_up(module, unfreeze_alone) if frozen else module
    parameters = {path for path, _ in named_leaves(unfrozen.parameters())}

    def role(path: str) -> str:
        if path not in parameters:
            return STATE
        return FROZEN if path in frozen else TRAINABLE

    return [(path, leaf, role(path)) for path, leaf in named_leaves(module)]


def _frozen_paths(module: Node) -> set[str]:
    """The paths of all arrays of a net that are frozen."""
    return {
        join_path(owner_path, path)
        for owner_path, each in named_modules(module)
        if (frozen := frozen_of(each)) != _NOT_FROZEN
        for path in _own_arrays(each)
        if frozen.whole or path in frozen.paths
    }


# --- trees with holes -------------------------------------------------------------------


def merge(first: T, second: PyTree) -> T:
    """The tree of ``first`` with every leaf of ``second``; either fills the holes of the other."""
    return _merge_levels(first, second, (first, second))


def _is_empty(value: object) -> bool:
    return isinstance(value, EmptyNode)


def _merge_levels(a: T, b: PyTree, whole: tuple[PyTree, PyTree]) -> T:
    leaves_a, treedef_a = jax.tree_util.tree_flatten(a, is_leaf=_is_empty)
    leaves_b, treedef_b = jax.tree_util.tree_flatten(b, is_leaf=_is_empty)
    if treedef_a == treedef_b:
        pairs = zip(leaves_a, leaves_b)
        leaves = [x if _is_empty(y) else y for x, y in pairs]
        return jax.tree_util.tree_unflatten(treedef_a, leaves)
    if _is_empty(a) or _is_empty(b):
        return b if _is_empty(a) else a
    # An empty node in one tree corresponds to a whole subtree of the other.
    items_a, level_a = one_level(a)
    items_b, level_b = one_level(b)
    if level_a != level_b or jax.tree_util.all_leaves([a]):
        raise StructureMismatchError(
            "Two trees to merge must have one structure where neither has an EmptyNode.",
            got="; ".join(structure_differences(*whole)[:3]),
            write="trees of one recipe in one mode (train or eval), e.g. "
            "module | module.parameters()",
        )
    pairs = zip(items_a, items_b)
    items = [_merge_levels(x, y, whole) for (_, x), (_, y) in pairs]
    return jax.tree_util.tree_unflatten(level_a, items)
