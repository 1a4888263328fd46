"""New modules from old ones: other attributes, another class, other nodes, other methods."""

from __future__ import annotations

import warnings
from typing import Any

from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pax_export._errors import (
    InvalidArgumentError,
    NearNameWarning,
    SharedNodeError,
    StructureMismatchError,
)
from pax_export.core._check import check_modules
from pax_export.core._containers import copy_containers
from pax_export.core._near_names import near_names
from pax_export.core._numpy_leaves import on_own_array
from pax_export.core._state_dict import state_dict
from pax_export.core._traversal import (
    apply_bottom_up,
    cached_by_treedef,
    modules_and_leaves,
    rebuilt,
)
from pax_export.core._tree import (
    STATIC,
    Node,
    attributes_of,
    current_kinds,
    cyclic,
    flatten,
    is_array,
    is_node,
    is_node_or_empty,
    kind_of,
    shows_static_leaves,
    unflatten,
    update_moduledef,
    without_static_leaves,
)


def with_static(node: Node, **changes: Any) -> Any:
    """A copy of a module with other values of static attributes that it has."""
    children, moduledef = flatten(node)
    return unflatten(moduledef.derived(moduledef.cls, moduledef.static | changes), children)


def with_class(node: Node, cls: type) -> Any:
    """A copy of a module as an instance of another class."""
    children, moduledef = flatten(node)
    return unflatten(moduledef.derived(cls, moduledef.static), children)


@cached_by_treedef()
def set_training(tree: Any, training: bool) -> Any:
    """A module, or any pytree of modules, with all of them in train or eval mode."""

    def switched(module: Any) -> Any:
        return apply_bottom_up(module, lambda m: m._with_training(training))

    return tree_map(lambda x: switched(x) if is_node(x) else x, tree, is_leaf=is_node)


def replace(module: Node, changes: dict[str, Any]) -> Any:
    """A new module with other values of attributes that it has."""
    for name in changes:
        if name in ("name", "training") and name not in attributes_of(module):
            raise AttributeError(
                f"{name!r} is read-only; write replace(_{name}=...)"
                + (" or train() and eval()" if name == "training" else "")
            )
        if not _has(module, name):
            near = near_names(name, attributes_of(module))
            raise InvalidArgumentError(
                "replace needs the name of an attribute that the module has.",
                where=f"{type(module).__qualname__}.{name}",
                got=f"the attributes {', '.join(attributes_of(module))}",
                write=(f"module.replace({near[0]}=...), or " if near else "")
                + f"module.set_attribute({name!r}, value) to add one",
            )
    return with_attributes(module, changes)


def _has(module: Node, name: str) -> bool:
    if name in attributes_of(module):
        return True
    value = getattr(type(module), name, _has)  # a default of the class
    return not (callable(value) or hasattr(value, "__get__"))


def with_attributes(module: Node, changes: dict[str, Any]) -> Any:
    """A new module with attributes added or replaced; it shares no container with the old one."""
    new = rebuilt(module)
    kinds = current_kinds(new)
    changes = {name: own_containers(value) for name, value in changes.items()}
    attributes_of(new).update(changes)
    update_moduledef(new, kinds | {name: kind_of(value) for name, value in changes.items()})
    check_modules(new)
    return new


def own_containers(value: Any) -> Any:
    """A value with containers of its own; modules and arrays in it stay what they are."""
    if kind_of(value) is STATIC:
        try:
            return copy_containers(value)
        except RecursionError:
            raise cyclic(value) from None
    if is_node_or_empty(value):
        return value
    leaves, treedef = tree_flatten(value, is_leaf=is_node_or_empty)
    own = [leaf if is_array(leaf) else copy_containers(leaf) for leaf in leaves]
    return tree_unflatten(treedef, own)


def set_attribute(module: Node, name: str, value: Any) -> Any:
    """A new module with an attribute added or replaced; warns of a name that looks mistyped."""
    names = [own for own in attributes_of(module) if not own.startswith("_")]
    known = name in names or hasattr(type(module), name)
    near = next(iter([] if known else near_names(name, names)), "")
    if near and _is_slip(name, near):
        warning = NearNameWarning(
            "set_attribute adds an attribute whose name is nearly that of one that the module has.",
            where=f"{type(module).__qualname__}.{name}",
            write=f"module.set_attribute({near!r}, value), if that was meant; replace takes "
            "only names that the module has",
        )
        warnings.warn(warning, stacklevel=3)
    return with_attributes(module, {name: value})


def _is_slip(name: str, near: str) -> bool:
    """True if letters of a name are exchanged, or one is missing or too many.

    Another letter at a place is no slip: ``conv1`` and ``conv2`` are two names.
    """
    if len(name) < 4 or name.endswith("s") != near.endswith("s"):  # a plural is another name
        return False
    if len(name) == len(near):
        return sorted(name) == sorted(near)
    long, short = sorted((name, near), key=len, reverse=True)
    if len(long) != len(short) + 1:
        return False
    at = next((n for n, (a, b) in enumerate(zip(long, short)) if a != b), len(short))
    return long[at + 1 :] == short[at:] and long[at].isalpha()


def replace_node(module: Any, node: Any, value: Any) -> Any:
    """A new module in which one node of the tree, which must occur once, is another."""
    found = 0

    def is_it(x: Any) -> bool:
        nonlocal found
        found += x is node
        return x is node

    items, treedef = tree_flatten(module, is_leaf=is_it)
    if found != 1:
        raise SharedNodeError(
            "replace_node needs a node that occurs exactly once in the module.",
            where=type(module).__qualname__,
            got=f"{found} occurrences of {type(node).__name__}",
            write="the array, module or container itself, as the module holds it",
        )
    new = tree_unflatten(treedef, [value if x is node else x for x in items])
    if is_node(new) and _shows_wrapping(new) and not _shows_wrapping(module):
        new = _unwrapped(new)  # else a module that was put in stays that very object
    check_modules(new)
    return new


def _shows_wrapping(module: Any) -> bool:
    """True for a tree of masks, where wrapping alone tells which leaves are static."""
    return any(
        shows_static_leaves(attributes_of(each)[name])
        for each in modules_and_leaves(module)[0]
        for name in flatten(each)[1].names
    )


def _unwrapped(module: Any) -> Any:
    """The module, with static leaves as they are where a new value made them look like masks."""

    def open_up(each: Any) -> Any:
        attributes = attributes_of(each)
        names = flatten(each)[1].names
        wrapped = {n: attributes[n] for n in names if shows_static_leaves(attributes[n])}
        if wrapped:
            attributes.update({n: without_static_leaves(v) for n, v in wrapped.items()})
            update_moduledef(each)
        return each

    return apply_bottom_up(module, open_up)


def map_leaves(module: Any, function: Any, *others: Any) -> Any:
    """tree_map over the arrays of modules; static data is that of the first."""
    function = function if others else on_own_array(function)
    leaves, treedef = tree_flatten(module)
    flat = [tree_flatten(other) for other in others]
    if all(other_def == treedef for _, other_def in flat):
        rows = zip(leaves, *[other_leaves for other_leaves, _ in flat])
        return tree_unflatten(treedef, [function(*row) for row in rows])
    # Modules of one architecture that differ in static data, a mode for
    # example, still have state dicts of one structure.
    dicts = [state_dict(m) if isinstance(m, Node) else m for m in (module, *others)]
    return _load_mapped(module, tree_map(function, *dicts))


def _load_mapped(module: Any, mapped: dict[str, Any]) -> Any:
    """Puts the leaves of a mapped state dict back into the module."""
    leaves, treedef = tree_flatten(module)
    # A dict sorts its keys and a module does not: follow numbers through both.
    numbers = state_dict(tree_unflatten(treedef, list(range(len(leaves)))))
    order = tree_leaves(numbers)
    values = tree_leaves(mapped)
    if len(values) != len(leaves):
        raise StructureMismatchError(
            "map needs a function that returns one leaf for each leaf.",
            where=type(module).__qualname__,
            got=f"{len(values)} leaves for {len(leaves)}",
            write="a function that returns an array",
        )
    by_number = dict(zip(order, values))
    return tree_unflatten(treedef, [by_number[number] for number in range(len(leaves))])
