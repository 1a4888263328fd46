"""Mutation scopes: which modules are mutable, and under which trace.

A constructor may change its object, `pure` its copies, and ``with mutable(module)`` the module.
Each opens a *scope*; only the innermost scope of the running thread or asyncio task counts.

A scope remembers its jax trace: changes under another trace would leak a tracer and are refused.
Setting an attribute only records its kind; the moduledef is made once, when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import ImmutableModuleError, InvalidArgumentError
from pax_export._foundations.jax import trace_state
from pax_export._foundations.types import PyTree
from pax_export.core._containers import KEYED, copy_containers, has_container, is_sequence
from pax_export.core._tree import (
    ARRAYS,
    STATIC,
    Node,
    attributes_now,
    attributes_of,
    current_kinds,
    drop_flat,
    flatten,
    is_node,
    kind_of,
    owner_of,
    set_flat,
    set_kinds,
    set_owner,
    thaw,
    update_moduledef,
)

# Slots of `Node` are read here.
# pyright: reportPrivateUsage=false

T = TypeVar("T")


class MutationScope:
    """A stretch of time in which some modules are open for change."""

    __slots__ = ("trace", "constructing", "closed", "adopted", "lender")

    def __init__(self, constructing: bool):
        self.trace = trace_state()
        self.constructing = constructing
        self.closed = False
        self.adopted: list[Node] = []
        # The scope whose modules are mutable here as well; see `lent_to_constructors`.
        self.lender: MutationScope | None = None


_current: ContextVar[MutationScope | None] = ContextVar("pax_export_mutation_scope", default=None)
_changed: ContextVar[list[Node] | None] = ContextVar("pax_export_changed_modules", default=None)


@contextmanager
def open_modules(
    nodes: Iterable[Node], *, constructing: bool = False
) -> Generator[MutationScope, None, None]:
    """Opens these modules, without submodules; `constructing` where no moduledef exists yet."""
    scope = MutationScope(constructing)
    outer = _current.get() if constructing else None
    if outer is not None and outer.lender is not None and outer.trace == scope.trace:
        scope.lender = outer.lender
    for node in nodes:
        _open(node, scope)
    token = _current.set(scope)
    try:
        yield scope
    finally:
        # A task that was started inside has a copy of the context in which
        # this scope is current indefinitely: hence the mark.
        scope.closed = True
        _current.reset(token)
        for node in scope.adopted:
            refresh_kinds(node)
        scope.adopted.clear()


@contextmanager
def changed_modules() -> Generator[list[Node], None, None]:
    """Lists the modules, also copies, whose attributes are set while the block runs."""
    changed: list[Node] = []
    token = _changed.set(changed)
    try:
        yield changed
    finally:
        _changed.reset(token)


@contextmanager
def lent_to_constructors() -> Generator[None, None, None]:
    """Lets constructors change the modules that are open here, such as an `RngSeq` argument."""
    scope = _current.get()
    before = scope and scope.lender
    if scope is not None and scope.lender is None:
        scope.lender = scope
    try:
        yield
    finally:
        if scope is not None:
            scope.lender = before


def open_children(parent: Node, children: Iterable[Node]) -> None:
    """Opens new modules for as long as their parent is open.

    A parent under construction opens nothing: a constructor changes only its own object.
    """
    scope = owner_of(parent)
    if scope is None or scope.constructing:
        return
    for node in children:
        _open(node, scope)
        scope.adopted.append(node)


def _open(node: Node, scope: MutationScope) -> None:
    set_owner(node, scope)
    if not scope.constructing and attributes_now(node):
        thaw(node)


def anything_is_open() -> bool:
    """False where no module at all may be changed."""
    return _current.get() is not None


def is_open(node: Node) -> bool:
    """True if this module may be changed here and now."""
    scope = _current.get()
    if scope is None or scope.closed:
        return False
    owner = node._pax_owner
    if owner is not scope and (owner is None or owner is not scope.lender or owner.closed):
        return False
    return scope.trace == trace_state()


def is_constructing(node: Node) -> bool:
    """True while the constructor of this module runs."""
    owner = node._pax_owner
    return owner is not None and owner.constructing and not owner.closed


def require_open(node: Node, action: str, name: str) -> None:
    """Raises unless this module may be changed here and now; the action is "set" or "delete"."""
    if is_open(node):
        return
    owner = node._pax_owner
    if owner is not None and owner is _current.get():
        got = "a module opened outside of the jax transformation, loop or branch that runs now"
        write = (
            "T.jit, T.grad, T.vmap, T.scan, T.cond ... of T = pax_export.transforms, with the "
            "module as an argument; or open it inside: jax.jit(pax.pure(f)), not "
            "pax.pure(jax.jit(f))"
        )
    elif owner is not None and not owner.closed and not owner.constructing:
        got = "a module that the function captured: only modules among its arguments are open in it"
        write = "the module as an argument: an operand of T.cond, a part of the carry of T.scan"
    else:
        got = "a module that no pax.pure, constructor or mutable() has open"
        known = name in attributes_of(node)
        change = f"replace({name}=...)" if known else f"set_attribute({name!r}, ...)"
        write = (
            f"module = module.{change}, or change it in a function decorated with pax.pure; for a "
            "call in train mode, which updates state: module, output = module % x to train, "
            "module.eval()(x) to evaluate"
        )
    raise ImmutableModuleError(
        f"Cannot {action} an attribute of an immutable module.",
        where=f"{type(node).__qualname__}.{name}",
        got=got,
        write=write,
    )


def take_over(node: Node, other: Node) -> None:
    """Copies the attributes of another module to an open one, which stays the same object."""
    attributes = attributes_of(node)
    attributes.clear()
    attributes.update({name: copy_containers(x) for name, x in attributes_of(other).items()})
    if not is_constructing(node):
        update_moduledef(node, current_kinds(other))


# --- attributes ---------------------------------------------------------------------


def _swap_subtree(node: Node, name: str, value: PyTree) -> bool:
    """Replaces a subtree by one of its kind; returns False if the kinds differ."""
    children, moduledef = flatten(node)
    if name not in moduledef.names[: moduledef.array_count]:
        return False
    index = moduledef.names.index(name)
    set_flat(node, ((*children[:index], value, *children[index + 1 :]), moduledef))
    return True


def refresh_kinds(node: Node) -> None:
    """Brings up to date a module whose attributes, or containers in them, may have changed."""
    update_moduledef(node, current_kinds(node))


def store_attribute(node: Node, name: str, value: object) -> None:
    """Sets an attribute of an open module; its moduledef follows."""
    attributes, kind = attributes_of(node), kind_of(value)
    object.__setattr__(node, name, value)
    if (changed := _changed.get()) is not None:
        changed.append(node)
    if name not in attributes:  # a property or another descriptor took it
        return
    kinds = node._pax_kinds
    if kinds is None:
        if kind is ARRAYS and not has_container(value) and _swap_subtree(node, name, value):
            return
        kinds = current_kinds(node)
        set_kinds(node, kinds)
        drop_flat(node)
    kinds[name] = kind


def remove_attribute(node: Node, name: str) -> None:
    """Deletes a static attribute; raises for a subtree."""
    if kind_of(attributes_of(node).get(name)) is not STATIC:
        raise InvalidArgumentError(
            "Cannot delete an attribute that holds arrays or modules.",
            where=f"{type(node).__qualname__}.{name}",
            write=f"self.{name} = None",
        )
    object.__delattr__(node, name)


# --- copies of numpy arrays of modules that `pure` opens; unchanged ones are given back


Copies = dict[int, tuple[np.ndarray, np.ndarray]]  # by the id of the copy: it, and the original


def with_own_arrays(tree: T) -> tuple[T, Copies]:
    """Copies the numpy arrays of modules; returns the new tree and the copies."""
    copies: Copies = {}

    def own(leaf: T) -> T:
        if not _is_numpy(leaf):
            return leaf
        new = leaf.copy(order="K")
        copies[id(new)] = (new, leaf)
        return new

    def of_module(part: T) -> T:
        return jax.tree_util.tree_map(own, part) if is_node(part) else part

    return jax.tree_util.tree_map(of_module, tree, is_leaf=is_node), copies


def _is_numpy(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray)


def on_own_array(function: Callable[[T], T]) -> Callable[[T], T]:
    """Wraps a function that may write to its argument: a numpy array is copied first.

    An unchanged copy in the result is replaced by the array.
    """

    def call(value: T) -> T:
        if not _is_numpy(value):
            return function(value)
        copy = value.copy(order="K")
        new = function(copy)
        return value if new is copy and _same_bytes(copy, value) else new

    return call


def give_back(modules: Iterable[Node], copies: Copies) -> None:
    """Restores the original arrays where the copies are unchanged."""
    same = {
        key: original for key, (copy, original) in copies.items() if _same_bytes(copy, original)
    }
    if not same:
        return
    for module in modules:
        attributes = attributes_of(module)
        changes = {name: _replace_arrays(value, same) for name, value in attributes.items()}
        changes = {n: value for n, value in changes.items() if value is not attributes[n]}
        if changes:
            attributes.update(changes)
            refresh_kinds(module)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays are the same to the last bit."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype.hasobject:
        return False
    one, other = (each.ravel(order="K").view(np.uint8) for each in (a, b))  # contiguous: no copies
    return one.data == other.data


def _replace_arrays(value: Any, same: dict[int, np.ndarray]) -> Any:
    """The value with the arrays in it exchanged; lists and dicts stay the objects they are."""
    kind = type(value)  # type: ignore  # of anything
    if _is_numpy(value):
        return same.get(id(value), value)
    if kind is list:
        value[:] = [_replace_arrays(x, same) for x in value]
    elif kind is dict or kind in KEYED:
        for key in value:
            value[key] = _replace_arrays(value[key], same)
    elif is_sequence(value) and isinstance(value, tuple):
        parts = [_replace_arrays(x, same) for x in value]
        if any(new is not old for new, old in zip(parts, value)):
            return tuple.__new__(kind, parts)  # type: ignore  # of the same class
    return value
