"""The view of a module that its methods see under a policy.

A method runs on a second object with cast arrays, so that neither exceptions nor other threads
see half-precision weights. Changes are then copied to the module.

The class of a view has the methods as they were written: what a method calls on ``self`` is
inside of the call, and is not cast again. The class, and not a mark on the object, says so,
because transforms flatten ``self`` and call methods of a copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import jmp
from jax.tree_util import tree_flatten, tree_leaves

from pax_export._types import DTypeLike, PyTree
from pax_export.core import (
    EmptyNode,
    Module,
    Node,
    StateModule,
    apply_bottom_up,
    attributes_now,
    attributes_of,
    current_kinds,
    derive_class,
    is_array,
    is_node,
    named_modules,
    owner_of,
    require_open,
    set_owner,
    store_attribute,
    update_moduledef,
    with_class,
)

_MISSING = object()


class ViewPolicy(jmp.Policy):
    """The policy of a view: its arrays are cast already, and its methods cast nothing."""


class CastView:
    """The cast view of a module on whose ``module`` one call of a method runs."""

    def __init__(self, original: Module, policy: jmp.Policy):
        self.original = original
        self.policy = policy
        own = _own_attributes(original)
        self._given = {n: cast_own(original, v, policy.compute_dtype) for n, v in own.items()}
        self._contents = {n: _container_content(v) for n, v in self._given.items()}
        self._originals = _pair_casts(own, self._given)
        inside = ViewPolicy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        self.module = object.__new__(derive_class(type(original), "mp_policy", inside))
        attributes_now(self.module).update(self._given)
        set_owner(self.module, owner_of(original))
        update_moduledef(self.module, current_kinds(original))
        self._given = _own_attributes(self.module)  # the containers of a closed one are read-only

    def close(self) -> None:
        """Ends the time in which the view may be changed."""
        set_owner(self.module, None)

    def write_back(self) -> None:
        """Copies changes of the view to the module; raises if a closed one's container changed."""
        now = _own_attributes(self.module)
        for name in self._given:
            if name not in now:
                delattr(self.original, name)
        for name, value in now.items():
            if not self._is_untouched(name, value):
                self._write_back_one(name, value)

    def _is_untouched(self, name: str, value: object) -> bool:
        if value is not self._given.get(name, _MISSING):
            return False
        (leaves, treedef), (given, given_def) = _container_content(value), self._contents[name]
        return treedef == given_def and all(a is b for a, b in zip(leaves, given))

    def _write_back_one(self, name: str, value: PyTree) -> None:
        value = cast_own(self.original, self._as_outside(value), self.policy.param_dtype)
        # A container that needed no cast is one object in both modules.
        if value is not attributes_of(self.original).get(name, _MISSING):
            require_open(self.original, "set", name)
            store_attribute(self.original, name, value)

    def result(self, tree: PyTree) -> Any:
        """Casts results to the output dtype, and replaces views by the modules themselves."""
        return cast_floating(self._as_outside(tree), self.policy.output_dtype)

    def _as_outside(self, tree: PyTree) -> Any:
        """Replaces the view by the module, and in modules made from it arrays and classes."""
        leaves, treedef = tree_flatten(tree, is_leaf=is_cast_leaf)
        found = [self._leaf_outside(leaf) for leaf in leaves]
        return tree if all(map(operator.is_, leaves, found)) else treedef.unflatten(found)

    def _leaf_outside(self, leaf: Any) -> Any:
        if leaf is self.module:
            return self.original
        if getattr(leaf, "__self__", None) is self.module:  # a method
            return getattr(self.original, leaf.__name__)
        if is_node(leaf):
            return self._module_outside(self._with_originals(leaf))
        return self._originals.get(id(leaf), (leaf, leaf))[1]

    def _module_outside(self, module: Node) -> Any:
        inside, outside = type(self.module), type(self.original)
        if all(type(each) is not inside for _, each in named_modules(module)):
            return module
        switch = lambda each: with_class(each, outside) if type(each) is inside else each  # noqa: E731
        return apply_bottom_up(module, switch)

    def _with_originals(self, tree: PyTree) -> Any:
        """Replaces cast arrays by the originals."""
        leaves, treedef = tree_flatten(tree)
        if not any(id(leaf) in self._originals for leaf in leaves):
            return tree
        found = [self._originals.get(id(leaf), (leaf, leaf))[1] for leaf in leaves]
        return treedef.unflatten(found)


def _own_attributes(module: PyTree) -> dict[str, Any]:
    """The attributes of a module, without cached properties."""
    cls = type(module)
    return {
        name: value
        for name, value in attributes_of(module).items()
        if not isinstance(getattr(cls, name, None), functools.cached_property)
    }


def _container_content(value: object) -> tuple[list[Any], Any]:
    """The contents of a container, to detect in-place changes."""
    if isinstance(value, (Node, EmptyNode)) or is_array(value):
        return [], None
    return tree_flatten(value, is_leaf=is_cast_leaf)


def _pair_casts(own: dict[str, Any], given: dict[str, Any]) -> dict[int, tuple[Any, Any]]:
    """``(cast array, the array it was cast from)`` by the id of the former."""
    pairs = {}
    for name, value in given.items():
        if value is not own[name]:
            before = tree_leaves(own[name], is_leaf=is_cast_leaf)
            after = tree_leaves(value, is_leaf=is_cast_leaf)
            pairs |= {id(b): (b, a) for a, b in zip(before, after) if a is not b}
    return pairs


# --- casts ------------------------------------------------------------------------------


def cast_floating(tree: PyTree, dtype: DTypeLike) -> Any:
    """Casts floating-point arrays outside of modules; an unchanged tree is returned itself."""
    leaves, treedef = tree_flatten(tree, is_leaf=is_cast_leaf)
    cast = [x.astype(dtype) if is_floating(x) and x.dtype != dtype else x for x in leaves]
    return tree if all(map(operator.is_, leaves, cast)) else treedef.unflatten(cast)


def cast_own(module: Module, tree: PyTree, dtype: DTypeLike) -> Any:
    """Casts what a module computes with, except for state, whose small steps would be lost."""
    return tree if isinstance(module, StateModule) else cast_floating(tree, dtype)


def is_cast_leaf(value: object) -> bool:
    """True for modules; and iterators, which jax does not look into either, and warns of."""
    return isinstance(value, (Node, Iterator))


def is_floating(value: PyTree) -> bool:
    """True for arrays of floating-point numbers."""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)
