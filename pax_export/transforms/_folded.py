"""Modules passed through jit as lists of leaves.

A jitted call would otherwise flatten every module on the way in and rebuild
every one on the way out, though most of what it returns is only handed on to
the next call.  Folded, a module is one node for jax; and what comes out is
taken apart only when its attributes are read (see `Node`).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_map

from pax_export._types import PyTree, TreeDef
from pax_export.core import Node, folded, is_labelled, is_node


class Folded:
    """A module as its leaves: the pair ``((leaves,), treedef)``, as jax wants it.

    The leaves are one child, a list: jax walks through its own lists faster than
    through the children of a node that it does not know.
    """

    __slots__ = ("pair",)

    def __init__(self, pair: tuple[Any, Any]):
        self.pair = pair


jax.tree_util.register_pytree_node(
    Folded, operator.attrgetter("pair"), lambda treedef, children: Folded((children, treedef))
)


@functools.lru_cache(maxsize=1024)
def _interned(treedef: TreeDef) -> Any:
    """The first of all equal treedefs: jax then compares pointers."""
    return treedef


def _fold(module: Node) -> Folded:
    pair = module._pax_folded
    if pair is None:
        leaves, treedef = tree_flatten(module)
        pair = (leaves,), treedef if is_labelled(module) else _interned(treedef)
    return Folded(pair)


def fold(tree: PyTree) -> Any:
    """A tree with every outermost module folded."""
    if isinstance(tree, Node):
        return _fold(tree)
    if isinstance(tree, jax.Array):
        return tree
    return tree_map(lambda x: _fold(x) if isinstance(x, Node) else x, tree, is_leaf=is_node)


def unfold(tree: PyTree) -> Any:
    """Unfolds every module of a tree, lazily."""
    if type(tree) is Folded:
        return folded(tree.pair)
    if type(tree) is tuple:
        return tuple([unfold(x) for x in tree])
    if isinstance(tree, jax.Array):
        return tree
    return tree_map(lambda x: unfold(x) if _is_folded(x) else x, tree, is_leaf=_is_folded)


def _is_folded(value: object) -> bool:
    return type(value) is Folded


@jax.tree_util.register_static
@dataclass(frozen=True)
class _ModuleSlot:
    """Placeholder for a module that was taken out of a tree."""


def take_out(tree: PyTree) -> tuple[Any, tuple[Folded, ...]]:
    """The tree without its folded modules, and these."""
    items, treedef = tree_flatten(tree, is_leaf=_is_folded)
    modules = tuple([x for x in items if _is_folded(x)])
    return treedef.unflatten([_ModuleSlot() if _is_folded(x) else x for x in items]), modules


def put_back(tree: PyTree, modules: tuple[Any, ...]) -> Any:
    """The reverse of `take_out`."""
    left = iter(modules)
    return tree_map(
        lambda x: next(left) if type(x) is _ModuleSlot else x,
        tree,
        is_leaf=lambda x: type(x) is _ModuleSlot or _is_folded(x),
    )
