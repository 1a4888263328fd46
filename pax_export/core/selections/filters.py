"""Filters that select leaves of a module: classes, paths, selections, predicates, or several.

`as_filter` turns one into a function from a module to a bool per leaf. The public name, also in
pickles, is `pax_export.transforms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_structure

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from pax_export._foundations.types import Array, ArrayLike
from pax_export.core._containers import is_sequence
from pax_export.core._parameters import merge
from pax_export.core._static import static_key
from pax_export.core._traversal import flatten_with_path, stop_at_submodules
from pax_export.core._tree import Node
from pax_export.core.selections.paths import (
    Chosen,
    at_or_below,
    better_path,
    dotted_path,
    path_pattern,
    plain_key,
    value_at,
    values_of,
)

Mask = list[bool]


@dataclass(frozen=True, eq=False)
class FilteredLeaf:
    """A leaf, its path, and the modules around it."""

    path: tuple[Any, ...]  # attribute names, indices and dict keys from the outermost module
    value: Any
    owners: tuple[Any, ...]  # the modules that contain it, outermost first
    attribute: str  # the attribute of the innermost owner

    @property
    def name(self) -> str:
        """The path with dots, as weights are named."""
        return dotted_path(self.path)


def leaves_of(module: Node) -> list[FilteredLeaf]:
    """The leaves of a module in tree order."""
    return list(_walk_leaves(module, (), ()))


def _walk_leaves(
    module: Node, path: tuple[Any, ...], owners: tuple[Any, ...]
) -> Iterator[FilteredLeaf]:
    owners = (*owners, module)
    items, _ = flatten_with_path(module, is_leaf=stop_at_submodules(module))
    for keys, item in items:
        steps = tuple([plain_key(key) for key in keys])
        if isinstance(item, Node):
            yield from _walk_leaves(item, path + steps, owners)
        else:
            yield FilteredLeaf(path + steps, item, owners, steps[0])


# --- the filters that have a name ---------------------------------------------------------


class Param:
    """Filter: the leaves that ``module.parameters()`` keeps.

    Leaves that `freeze_parameters` froze are not selected.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> net = pax.Sequential(pax.Linear(2, 2), pax.Dropout(0.5))
        >>> grads = T.grad(lambda net: net(jnp.ones((1, 2))).sum(), wrt=T.Param)(net)
        >>> grads[1].rng_key
        EmptyNode
    """


class State:
    """Filter: the leaves that ``module.parameters()`` does not keep.

    Example:
        >>> from pax_export import transforms as T
        >>> axes = T.StateAxes({T.State: None, ...: 0})
    """


class RngState:
    """Filter: the random keys of a module.

    These are all typed keys, and the legacy keys (uint32) in attributes that
    the class of a module names in ``rng_attributes``.

    Example:
        >>> import pax_export as pax
        >>> from pax_export import transforms as T
        >>> pax.Dropout.rng_attributes
        ('rng_key',)
        >>> ensemble = T.Vmap(pax.Dropout, axis_size=3, state_axes={T.RngState: 0})(0.5)
        >>> ensemble.vmap_module.rng_key.shape
        (3, 2)
    """


@dataclass(frozen=True)
class PathContains:
    """Filter: the leaves whose path contains a name, an index or a dict key.

    Args:
        key: a name that the path must contain.

    Example:
        >>> from pax_export.transforms import PathContains
        >>> PathContains(2)(("modules", 2, "bias"), None)
        True
    """

    key: Any

    def __call__(self, path: tuple[Any, ...], leaf: ArrayLike | None) -> bool:
        """True if the path contains the key."""
        return self.key in path


class PathIn:
    """Filter: the leaves at these paths.

    Args:
        *paths: tuples of attribute names, indices and dict keys, from the
            outermost module.

    Example:
        >>> from pax_export.transforms import PathIn
        >>> PathIn(("modules", 2, "bias"))(("modules", 2, "bias"), None)
        True
    """

    def __init__(self, *paths: tuple[Any, ...]):
        self.paths = frozenset(paths)

    def __call__(self, path: tuple[Any, ...], leaf: ArrayLike | None) -> bool:
        """True if the path is one of these."""
        return path in self.paths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathIn) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"PathIn({', '.join(map(repr, sorted(self.paths, key=repr)))})"


class _Several:
    """A filter composed of filters."""

    def __init__(self, *filters: Selector):
        for each in filters:
            as_filter(each)  # raises an error here, where the filter is made
        self.filters = filters
        self._key = static_key(filters)  # predicates count by their code

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key == other._key  # type: ignore

    def __hash__(self) -> int:
        return hash((type(self), self._key))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.filters))})"


class All(_Several):
    """Filter: the leaves that every one of these selects.

    Args:
        *filters: filters.

    Raises:
        InvalidArgumentTypeError: (a TypeError) one is not a filter.

    Example:
        >>> import pax_export as pax
        >>> from pax_export.transforms import All, Not, Param
        >>> All(Param, Not("bias"))
        All(<class '...Param'>, Not('bias'))
    """


class AnyOf(_Several):
    """Filter: the leaves that at least one of these selects.

    Args:
        *filters: filters.

    Raises:
        InvalidArgumentTypeError: (a TypeError) one is not a filter.

    Example:
        >>> from pax_export.transforms import Any
        >>> Any("weight", "bias")
        Any('weight', 'bias')
    """


AnyOf.__name__ = AnyOf.__qualname__ = "Any"


class Not(_Several):
    """Filter: the leaves that this one does not select.

    Args:
        filter: a filter.

    Raises:
        InvalidArgumentTypeError: (a TypeError) it is not a filter.

    Example:
        >>> from pax_export.transforms import Not
        >>> Not("bias")
        Not('bias')
    """

    def __init__(self, filter: Selector):
        super().__init__(filter)


# Pickles of a `Vmap` with filters use these names, whatever module defines them.
PLAIN_FILTERS = (Param, State, RngState)
MADE_FILTERS = (All, AnyOf, Not, PathContains, PathIn)
for _each in (*PLAIN_FILTERS, *MADE_FILTERS):
    _each.__module__ = "pax_export.transforms"


# --- selection -----------------------------------------------------------------------


#: What selects modules or leaves: a path, a class, a selection, a predicate, or several of them.
Selector: TypeAlias = (
    str | type[Any] | bool | EllipsisType | Node | Chosen | Callable[..., Any] | All | AnyOf | Not
    | Iterable[Any] | None
)  # fmt: skip


def as_filter(value: Selector) -> Callable[[Any], Mask]:
    """Returns a function that tests whether a filter selects a leaf of a module."""
    rule = as_rule(value)
    return lambda module: rule(module, leaves_of(module))


Rule = Callable[[Any, list[FilteredLeaf]], Mask]


def as_rule(value: Selector) -> Rule:
    """Like `as_filter`, for a module whose leaves are already listed."""
    if isinstance(value, _Several) or is_sequence(value):
        return _rule_of_several(value)
    if value is Param or value is State:
        return lambda module, leaves: [
            is_trained is (value is Param) for is_trained in _parameter_mask(module)
        ]
    if isinstance(value, Node):
        return lambda module, leaves: _mask_of(module, value)
    if isinstance(value, Chosen):
        return lambda module, leaves: _is_in_places(module, leaves, value)
    test = _test_of(value)
    return lambda module, leaves: [test(leaf) for leaf in leaves]


def _test_of(value: Selector) -> Callable[[FilteredLeaf], bool]:
    """A filter that needs to see one leaf at a time only."""
    if value is ... or value is True:
        return lambda leaf: True
    if value is None or value is False:
        return lambda leaf: False
    if value is RngState:
        return is_random_key
    if isinstance(value, type) and issubclass(value, Node):
        return lambda leaf: any(isinstance(owner, value) for owner in leaf.owners)
    if isinstance(value, str):
        pattern = path_pattern(value, anywhere=True)
        return lambda leaf: pattern.covers(leaf.name) or _is_called(leaf, value)
    if not isinstance(value, type) and callable(value):
        return lambda leaf: bool(value(leaf.path, leaf.value))
    raise InvalidArgumentTypeError(
        "A filter of leaves is needed.",
        got=f"{type(value).__name__}: {value!r}"[:120],
        write="Param, State, RngState, a Module class, a path, a selection of net.at(...), "
        "a module of bools, a predicate of (path, leaf), PathIn, PathContains, All, Any, Not, "
        "True, False, or a list of these",
    )


def _is_called(leaf: FilteredLeaf, name: str) -> bool:
    """True if a module around a leaf was given this name."""
    return any(owner.name == name for owner in leaf.owners)


def _is_in_places(module: Node | None, leaves: list[FilteredLeaf], places: Chosen) -> Mask:
    """Tests whether leaves are in places selected in this or a similar net."""
    if module is None:
        return [False]
    for steps in places.paths:
        value_at(module, steps)  # or an error: it was chosen in another net
    chosen = frozenset(places.paths)
    return [at_or_below(leaf.path, chosen) for leaf in leaves]


def _rule_of_several(value: _Several | Iterable[Selector]) -> Rule:
    filters = value.filters if isinstance(value, _Several) else value
    rules = [as_rule(each) for each in filters]
    if isinstance(value, Not):
        return lambda module, leaves: [not x for x in rules[0](module, leaves)]
    combine = all if isinstance(value, All) else any

    def several(module: Node, leaves: list[FilteredLeaf]) -> Mask:
        masks = [rule(module, leaves) for rule in rules]
        return [combine(mask[i] for mask in masks) for i in range(len(leaves))]

    return several


def _parameter_mask(module: Node | None) -> Mask:
    """Returns the leaves that ``module.parameters()`` keeps."""
    if module is None:
        return [False]  # the ambient stream of keys, which is in no module
    parameters = module.parameters()
    trained = [True] * len(tree_leaves(parameters))
    return _mask_of(module, tree_structure(parameters).unflatten(trained))


def _mask_of(module: Node | None, mask: Node) -> Mask:
    """Returns the True leaves of a mask; an EmptyNode marks none."""
    if module is None:
        return [False]
    none = tree_structure(module).unflatten([False] * len(tree_leaves(module)))
    return [leaf is True or _is_true(leaf) for leaf in tree_leaves(merge(none, mask))]


def _is_true(leaf: Array) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bool_ and bool(leaf.all())


def is_random_key(leaf: FilteredLeaf) -> bool:
    """True for typed keys, and for legacy keys if the class declares them."""
    dtype = getattr(leaf.value, "dtype", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == jnp.uint32 and leaf.attribute in leaf.owners[-1].rng_attributes


# --- names that must exist ----------------------------------------------------------------


def has_names(value: Selector) -> bool:
    """Whether a filter names something that it selects: a path, or a key of one.

    A class may select nothing: code for any net excludes its batch norms by `Not(BatchNorm1D)`.
    """
    return next(_names_in(value), None) is not None


def _names_in(value: Selector) -> Iterator[str | PathContains | PathIn]:
    parts = value.filters if isinstance(value, _Several) else value
    if is_sequence(parts):
        for each in parts:
            yield from _names_in(each)
    elif isinstance(value, PathIn):
        yield from map(PathIn, sorted(value.paths, key=repr))
    elif isinstance(value, (str, PathContains)):
        yield value


def require_names(value: Selector, modules: Iterable[Any], where: str) -> None:
    """Raises if a filter names a path that none of these modules has."""
    if not has_names(value):
        return
    modules = list(modules)
    leaves = [leaf for module in modules for leaf in leaves_of(module)]
    places = [
        FilteredLeaf(steps, part, (part,), "")
        for module in modules
        for steps, part in values_of(module)
        if isinstance(part, Node)
    ]
    require_names_among(value, leaves, where, places)


def require_names_among(
    value: Selector, leaves: list[FilteredLeaf], where: str, places: Iterable[FilteredLeaf] = ()
) -> None:
    """Raises if a filter names nothing among these leaves, or modules, which may be empty."""
    for each in _names_in(value):
        test = _test_of(each)
        candidates = leaves if isinstance(each, PathIn) else [*leaves, *places]
        if not any(map(test, candidates)):
            raise InvalidArgumentError(
                "A filter selects nothing by this name.",
                where=where,
                got=repr(each),
                write=_near_filter(each, leaves),
            )


def _near_filter(name: str | PathContains | PathIn, leaves: list[FilteredLeaf]) -> str:
    """Suggests paths of these leaves in place of a filter that selects none."""
    paths = [leaf.name for leaf in leaves]
    text = name if isinstance(name, str) else dotted_path(_first_key(name))
    near = better_path(text, [*[path.split(".")[0] for path in paths], *paths])
    return near or "a filter of modules with leaves: these have none"


def _first_key(name: PathContains | PathIn) -> Iterable[Any]:
    return [name.key] if isinstance(name, PathContains) else next(iter(name.paths))
