"""Traversals of module trees, by jax's C code with an ``is_leaf`` that collects modules."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar, TypeVarTuple

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from pax_export._foundations.types import PyTree, TreeDef
from pax_export.core._static import LABEL, Label
from pax_export.core._tree import Node, attributes_of, flatten, is_node, unflatten

Ts = TypeVarTuple("Ts")
T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M", bound=Node)

Steps = tuple[Any, ...]  # attribute names, indices and dict keys, from the root
KeyPath = tuple[Any, ...]  # the same as jax's keys
#: jax's function; type checkers do not know its keys.
flatten_with_path: Callable[..., tuple[list[tuple[KeyPath, Any]], TreeDef]]
flatten_with_path = jax.tree_util.tree_flatten_with_path  # type: ignore


def plain_key(key: Hashable) -> Any:
    """Returns the name, index or dict key of one entry of a jax key path."""
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)


def path_name(path: KeyPath) -> str:
    """Writes a jax key path with dots, e.g. ``encoder.layers.3.weight``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")  # type: ignore


def join_path(path: str, name: str) -> str:
    """The dotted name of something below a path."""
    return f"{path}.{name}" if path and name else path or name


def is_at(path: str, parent: str) -> bool:
    """Whether a path is this place, or below it."""
    return not parent or path == parent or path.startswith(f"{parent}.")


def one_level(tree: PyTree) -> tuple[list[tuple[KeyPath, Any]], TreeDef]:
    """The direct children of any pytree node with their key paths, and its treedef."""
    return flatten_with_path(tree, is_leaf=functools.partial(operator.is_not, tree))


def rebuild_tree(tree: T) -> T:
    """The same leaves in new modules and containers."""
    leaves, treedef = tree_flatten(tree)
    return tree_unflatten(treedef, leaves)


def _collect(cls: type, modules: list[Any], met: set[int] | None) -> Callable[[Any], bool]:
    """Returns an ``is_leaf`` that lists instances of a class and stops at the nodes in `met`."""

    def collect(value: object) -> bool:
        if isinstance(value, cls):
            modules.append(value)
            if met is not None:
                if id(value) in met:
                    return True
                met.add(id(value))
        return False

    return collect


def modules_and_leaves(tree: PyTree, *, once: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns all modules, parents first, and leaves; with `once`, repeated modules are leaves."""
    modules: list[Any] = []
    collect = _collect(Node, modules, set() if once else None)
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=collect)
    return modules, leaves


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns all leaves with their dotted names, in tree order.

    Example:
        >>> import pax_export as pax
        >>> [name for name, _ in named_leaves(pax.Sequential(pax.Linear(1, 2)))]
        ['modules.0.weight', 'modules.0.bias']
    """
    leaves, _ = flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in leaves]


def named_modules(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns all modules with their dotted names, parents first; the root's is empty."""
    return [(path_name(path), module) for path, module in modules_with_paths(tree)]


def modules_with_paths(tree: PyTree) -> list[tuple[KeyPath, Any]]:
    """Returns all modules with their key paths, parents first."""
    found: list[tuple[KeyPath, Any]] = []

    def visit(
        prefix: KeyPath, part: PyTree, stop: Callable[[Any], bool], around: frozenset[int]
    ) -> None:
        for path, item in flatten_with_path(part, is_leaf=stop)[0]:
            if isinstance(item, Node):
                found.append((prefix + path, item))
                if id(item) not in around:  # a module in itself: that is refused elsewhere
                    visit(prefix + path, item, stop_at_submodules(item), around | {id(item)})

    visit((), tree, is_node, frozenset())
    return found


def stop_at_submodules(module: Node) -> Callable[[Any], bool]:
    outside = True

    def stop(value: object) -> bool:
        nonlocal outside
        if outside and value is module:
            outside = False  # met again: it contains itself
            return False
        return isinstance(value, Node)

    return stop


def submodules(module: Node) -> list[Any]:
    """The direct submodules, in tree order, found through containers."""
    items = jax.tree_util.tree_leaves(module, is_leaf=stop_at_submodules(module))
    return [item for item in items if isinstance(item, Node)]


def named_submodules(module: Node) -> list[tuple[str, Any]]:
    """The direct submodules with their dotted names below the module, in tree order."""
    items, _ = flatten_with_path(module, is_leaf=stop_at_submodules(module))
    return [(path_name(path), item) for path, item in items if isinstance(item, Node)]


def map_attributes(module: M, function: Callable[[str, Any], Any]) -> M:
    """Returns a module with ``function(attribute name, subtree)`` for each subtree."""
    children, moduledef = flatten(module)
    pairs = zip(moduledef.names, children)
    return unflatten(moduledef, tuple([function(name, child) for name, child in pairs]))


def map_submodules(module: M, function: Callable[[Any], Any]) -> M:
    """Returns a module with ``function(submodule)`` for each direct submodule."""
    items, treedef = tree_flatten(module, is_leaf=stop_at_submodules(module))
    items = [function(x) if isinstance(x, Node) else x for x in items]
    return tree_unflatten(treedef, items)


def fold_bottom_up(
    module: Node,
    build: Callable[[Any, Iterator[Any]], Any],
    below: Callable[[Any], list[Node]] = submodules,
) -> Any:
    """Folds a tree with ``build(module, results of its submodules)``, without recursion."""
    order: list[Node] = []
    left = [module]
    while left:
        order.append(left.pop())
        left += below(order[-1])
    built: list[Any] = []  # modules whose parent is not built yet
    for each in reversed(order):
        first = len(built) - len(below(each))
        parts = built[first:]
        del built[first:]
        built.append(build(each, iter(parts)))
    return built[0]


def apply_bottom_up(module: Node, function: Callable[[Any], Any]) -> Any:
    """Applies a function to every module, children before their parents."""
    return fold_bottom_up(
        module, lambda each, parts: function(map_submodules(each, lambda sub: next(parts)))
    )


# --- functions that only move leaves ------------------------------------------------


def is_labeled(module: PyTree) -> bool:
    """Returns whether a module has its path; its treedef is then unlike an equal one."""
    return Label.in_use and is_node(module) and LABEL in attributes_of(module)


def cached_by_treedef(
    runs_foreign_code: Callable[[Any], bool] = lambda module: False,
) -> Callable[[Callable[[T, *Ts], R]], Callable[[T, *Ts], R]]:
    """Decorates a function of a module that moves or drops leaves and depends on the treedef alone.

    It runs once per treedef, on placeholders; later calls replay its plan in C: flatten, pick,
    unflatten. So ``eval()`` and ``parameters()`` cost as much as a copy. Other arguments must be
    hashable. `runs_foreign_code` returns True for modules whose code needs real leaves.
    """

    def decorate(function: Callable[[T, *Ts], R]) -> Callable[[T, *Ts], R]:
        @functools.lru_cache(maxsize=256)
        def plan(treedef: TreeDef, arguments: tuple[*Ts]) -> tuple[list[int], TreeDef] | None:
            stand_ins = [object() for _ in range(treedef.num_leaves)]
            numbers = {id(leaf): number for number, leaf in enumerate(stand_ins)}
            skeleton = tree_unflatten(treedef, stand_ins)
            if any(map(runs_foreign_code, modules_and_leaves(skeleton)[0])):
                return None
            leaves, out_treedef = tree_flatten(function(skeleton, *arguments))
            return [numbers[id(leaf)] for leaf in leaves], out_treedef

        @functools.wraps(function)
        def replay(module: T, *arguments: *Ts) -> R:
            leaves, treedef = tree_flatten(module)
            found = None if is_labeled(module) else plan(treedef, arguments)
            if found is None:
                return function(module, *arguments)
            picks, out_treedef = found
            return tree_unflatten(out_treedef, [leaves[i] for i in picks])

        return replay

    return decorate
