"""New modules from old ones: with another class, other methods, attributes or subtrees.

`edit_at` is the one mechanism; PAX's `replace`, `set_attribute` and `replace_node`, and
selections, choose places for it.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jax.tree_util import all_leaves, tree_flatten, tree_map, tree_unflatten

from pax_export._foundations.errors import (
    InvalidArgumentError,
    SharedNodeError,
    StructureMismatchError,
    near_names,
)
from pax_export._foundations.types import PyTree
from pax_export.core._check import check_modules, refuse_hidden
from pax_export.core._containers import READ_ONLY, copy_containers, is_dict, is_sequence
from pax_export.core._parameters import frozen_of
from pax_export.core._scopes import on_own_array
from pax_export.core._static import (
    aspect_of,
    derive_class,
    is_self_contained,
    register_aspect,
)
from pax_export.core._traversal import (
    Steps,
    apply_bottom_up,
    cached_by_treedef,
    flatten_with_path,
    one_level,
    plain_key,
    rebuild_tree,
)
from pax_export.core._tree import (
    STATIC,
    Node,
    attributes_of,
    current_kinds,
    cycle_error,
    flatten,
    is_array,
    is_node,
    is_node_or_empty,
    kind_of,
    unflatten,
    update_moduledef,
)

M = TypeVar("M", bound=Node)
T = TypeVar("T")
#: Maps the old value at a place to the new one.
Change = Callable[[Any], Any]


def with_static(node: M, **changes: object) -> M:
    """A copy of a module with other values of static attributes that it has."""
    children, moduledef = flatten(node)
    return unflatten(moduledef.derived(moduledef.cls, moduledef.static | changes), children)


def with_class(node: Node, cls: type) -> Any:
    """A copy of a module as an instance of another class."""
    children, moduledef = flatten(node)
    return unflatten(moduledef.derived(cls, moduledef.static), children)


# --- the mechanism of all edits ----------------------------------------------------


def edit_at(tree: Node, changes: Mapping[Steps, Change], *, same_kinds: bool = False) -> Any:
    """Returns a new tree with ``change(old value)`` at each of these places.

    Every edit of a module uses this function. Children are changed before their parents.

    Args:
        tree: a module.
        changes: steps from the root -> function of the old value. The last step may name a
            new attribute of a module, whose function gets None.
        same_kinds: keep whether an attribute is a subtree or static, whatever the new value
            is. Such changes also work on trees with placeholders for leaves.

    Raises:
        SharedNodeError: a module or array would occur twice.
    """
    new, left = rebuild_tree(tree), dict(changes)
    while depth := max(map(len, left), default=0):
        inner: dict[Steps, dict[Any, Change]] = {}
        for steps in [steps for steps in left if len(steps) == depth]:
            inner.setdefault(steps[:-1], {})[steps[-1]] = left.pop(steps)
        for steps, items in inner.items():
            parent = functools.reduce(_child_at, steps, new)
            if isinstance(parent, Node):
                _change_attributes(parent, items, same_kinds)
            else:  # a container: this changes the module around it
                left[steps] = partial(_with_items, items, left.get(steps))
    if () in left:
        new = left[()](new)
    if not same_kinds:
        check_modules(new)
    return new


def _child_at(value: PyTree, step: Hashable) -> Any:
    if is_node(value):
        return attributes_of(value)[step]  # type: ignore[index]  # a name
    if is_dict(value) or (is_sequence(value) and not hasattr(value, "_fields")):
        return value[step]  # type: ignore[index]  # a key, or an index
    return next(item for path, item in one_level(value)[0] if plain_key(path[0]) == step)


def _change_attributes(owner: Node, changes: dict[str, Change], same_kinds: bool) -> None:
    """Changes the attributes of a new module."""
    attributes, kinds = attributes_of(owner), dict(current_kinds(owner))
    old = {name: copy_containers(attributes.get(name)) for name in changes}
    new = {name: change(old[name]) for name, change in changes.items()}
    if not same_kinds:
        new = {name: own_containers(value) for name, value in new.items()}
        kinds |= {name: kind_of(value) for name, value in new.items()}
    attributes.update(new)
    update_moduledef(owner, kinds)
    if not same_kinds:
        refuse_hidden(owner)


def _with_items(changes: dict[Any, Change], then: Change | None, value: PyTree) -> Any:
    """A container with changed items; it is changed itself `then`."""
    if is_dict(value) or (is_sequence(value) and not isinstance(value, tuple)):
        value = copy_containers(value)
        for step, change in changes.items():
            value[step] = change(value[step])
    else:
        items, treedef = one_level(value)
        pairs = [(plain_key(path[0]), item) for path, item in items]
        new = [changes[step](item) if step in changes else item for step, item in pairs]
        value = tree_unflatten(treedef, new)
    return value if then is None else then(value)


def own_containers(value: T) -> T:
    """Copies the containers of a value, but not modules and arrays in them."""
    if kind_of(value) is STATIC:
        try:
            return copy_containers(value)
        except RecursionError:
            raise cycle_error(value) from None
    if is_node_or_empty(value):
        return value
    leaves, treedef = tree_flatten(value, is_leaf=is_node_or_empty)
    own = [leaf if is_array(leaf) else copy_containers(leaf) for leaf in leaves]
    return tree_unflatten(treedef, own)


# --- PAX's functions -----------------------------------------------------------------


@cached_by_treedef()
def set_training(tree: T, training: bool) -> T:
    """Returns a module, or pytree of modules, with all modules in train or eval mode."""

    def switched(part: T) -> T:
        if not is_node(part):
            return part
        return apply_bottom_up(
            part, lambda m: m._with_training(training and not frozen_of(m).statistics)
        )

    return tree_map(switched, tree, is_leaf=is_node)


def replace(module: M, changes: dict[str, Any]) -> M:
    """A new module with other values of attributes that it has."""
    for name in changes:
        if name in ("name", "training") and name not in attributes_of(module):
            raise AttributeError(
                f"{name!r} is read-only; write replace(_{name}=...)"
                + (" or train() and eval()" if name == "training" else "")
            )
        if not _has_attribute(module, name):
            near = near_names(name, attributes_of(module))
            raise InvalidArgumentError(
                "replace needs the name of an attribute that the module has.",
                where=f"{type(module).__qualname__}.{name}",
                got=f"the attributes {', '.join(attributes_of(module))}",
                write=(f"module.replace({near[0]}=...), or " if near else "")
                + f"module.set_attribute({name!r}, value) to add one",
            )
    return with_attributes(module, changes)


def _has_attribute(module: Node, name: str) -> bool:
    if name in attributes_of(module):
        return True
    value = getattr(type(module), name, _has_attribute)  # a default of the class
    return not (callable(value) or hasattr(value, "__get__"))


def with_attributes(module: M, changes: dict[str, Any]) -> M:
    """A new module with attributes added or replaced."""
    return edit_at(module, {(name,): lambda old, new=new: new for name, new in changes.items()})


def replace_node(module: Node, node: PyTree, value: PyTree) -> Any:
    """A new module in which one node of the tree, which must occur once, is another."""
    if type(node) in READ_ONLY:
        places = list(_places_of(node, module, ()))
    else:
        items, _ = flatten_with_path(module, is_leaf=partial(operator.is_, node))
        places = [tuple(map(plain_key, path)) for path, item in items if item is node]
    if len(places) != 1:
        raise SharedNodeError(
            "replace_node needs a node that occurs exactly once in the module.",
            where=type(module).__qualname__,
            got=f"{len(places)} occurrences of {type(node).__name__}",
            write="the array, module or container itself, as the module holds it",
        )
    new = edit_at(module, {places[0]: lambda old: value}, same_kinds=True)
    check_modules(new)
    return new


def _places_of(container: PyTree, value: PyTree, steps: Steps) -> Iterator[Steps]:
    """The places of a container of a closed module, which is not among the children for jax."""
    if value is container:
        yield steps
    elif is_node(value) or is_dict(value):
        for key, part in (attributes_of(value) if is_node(value) else value).items():
            yield from _places_of(container, part, (*steps, key))
    elif is_sequence(value):
        for key, part in enumerate(value):
            yield from _places_of(container, part, (*steps, key))


def map_leaves(module: M, function: Callable[..., Any], *others: PyTree) -> M:
    """tree_map over the arrays of modules; static data is taken from the first module."""
    function = function if others else on_own_array(function)
    leaves, treedef = tree_flatten(module)
    flat = [tree_flatten(other) for other in others]
    if all(other_def == treedef for _, other_def in flat):
        rows = zip(leaves, *[other_leaves for other_leaves, _ in flat])
        return tree_unflatten(treedef, [function(*row) for row in rows])
    # Modules of one architecture may differ in static data, in a mode for example.
    rows = [_by_steps(each) for each in (module, *others)]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise StructureMismatchError(
            "map needs modules, or state dicts, with the same arrays.",
            where=type(module).__qualname__,
            got=f"{' and '.join(str(len(row)) for row in rows)} leaves, of different names",
            write="modules of one recipe",
        )
    new = [function(*[row[steps] for row in rows]) for steps in rows[0]]
    if not all_leaves(new):
        raise StructureMismatchError(
            "map needs a function that returns one leaf for each leaf.",
            where=type(module).__qualname__,
            write="a function that returns an array",
        )
    return tree_unflatten(treedef, new)


def _by_steps(tree: PyTree) -> dict[Steps, Any]:
    return {tuple(map(plain_key, path)): leaf for path, leaf in flatten_with_path(tree)[0]}


# --- partition specs of arrays, as static data --------------------------------------

SPECS = "_partition_specs"

Spec = tuple[Any, ...]


def specs_of(module: Node) -> dict[str, Spec]:
    """The specs that a module itself declares, by attribute."""
    return dict(attributes_of(module).get(SPECS, ()))


def with_specs(module: Node, specs: Mapping[str, Any]) -> Any:
    """Returns a module that declares these specs in addition to its own."""
    children, moduledef = flatten(module)
    values = dict(zip(moduledef.names, children))
    for name in specs:
        if name not in values or isinstance(values[name], Node):
            raise InvalidArgumentError(
                "with_sharding needs the name of an attribute of the module that holds an array.",
                where=f"{type(module).__qualname__}.{name}",
                got=f"the attributes {', '.join(values)}",
                write="module.replace(layer=module.layer.with_sharding(...)) for one inside",
            )
    merged = specs_of(module) | {name: tuple(spec) for name, spec in specs.items()}
    return with_attributes(module, {SPECS: tuple(merged.items())})


# --- other methods -----------------------------------------------------------------

#: The attribute with the methods that read variables. jax keeps every class that it sees, so those
#: are static data of the module, and one class for all looks them up; functions that read only
#: their arguments are methods of a class.
METHODS = "_replaced_methods"


class OfInstance(NamedTuple):
    """A method of a recipe that each module stores itself."""

    name: str
    bound: bool  # whether it gets the module as its first argument


class _MethodSlot:
    """A class attribute for a method that each module stores itself."""

    def __init__(self, name: str):
        self.name = name
        self.__name__ = name

    def __get__(self, module: Node | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        method = dict(attributes_of(module)[METHODS])[self.name]
        return method.__get__(module, owner) if _binds_module(method) else method

    def __call__(self, module: Node, /, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(module, type(module))(*args, **kwargs)


class _StaticMethod(staticmethod):  # type: ignore[type-arg]  # has none at run time
    """A class attribute for a callable that each module stores itself and that takes no module."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self.__wrapped__.__get__(module, owner)


def replace_method(module: M, methods: dict[str, Any]) -> M:
    """A module with the same data and other methods."""
    before: dict[str, Any] = dict(aspect_of(type(module), "methods") or ())
    own_methods = dict(attributes_of(module).get(METHODS, ()))
    for name, method in methods.items():
        own_methods.pop(name, None)
        before[name] = method
        if _is_made_anew(method):
            own_methods[name] = method
            before[name] = OfInstance(name, _binds_module(method))
    cls = derive_class(type(module), "methods", tuple(sorted(before.items())))
    children, moduledef = flatten(rebuild_tree(module))
    static = {name: value for name, value in moduledef.static.items() if name != METHODS}
    if own_methods:
        static[METHODS] = tuple(sorted(own_methods.items()))
    new = unflatten(moduledef.derived(cls, static), children)
    refuse_hidden(new)
    return new


def _binds_module(method: Callable[..., Any]) -> bool:
    """Returns whether a callable gets the module as its first argument when it is a method."""
    # New versions of Python give a partial a `__get__`, which so far only warns.
    return hasattr(method, "__get__") and not isinstance(method, functools.partial)


def _is_made_anew(method: Callable[..., Any]) -> bool:
    """Returns whether a callable may be a new object each time its line of code runs."""
    if isinstance(method, (type, property, staticmethod, classmethod)) or not callable(method):
        return False
    if isinstance(method, types.FunctionType):
        defaults = method.__defaults__ or method.__kwdefaults__
        return bool(defaults) or not is_self_contained(method)
    return not isinstance(method, types.BuiltinFunctionType)


def _replaced_methods(
    base: type, namespace: dict[Any, Any], methods: tuple[Any, ...]
) -> dict[str, Any]:
    return {name: _in_class(method) for name, method in methods}


def _in_class(method: Callable[..., Any]) -> Any:
    if not isinstance(method, OfInstance):
        return method
    return _MethodSlot(method.name) if method.bound else _StaticMethod(_MethodSlot(method.name))


register_aspect("methods", _replaced_methods)
