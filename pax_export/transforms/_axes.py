"""Axis arguments of vmap and scan: an axis or None for each leaf of arguments and results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map

from pax_export._foundations.check import checked_integer
from pax_export._foundations.errors import (
    InvalidArgumentError,
    UncoveredStateError,
)
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import (
    EmptyNode,
    Node,
    Selector,
    as_filter,
    has_names,
    is_node,
    is_random_key,
    join_path,
    leaves_of,
    one_level,
    path_name,
    require_names,
    static_key,
)
from pax_export.transforms._lift import (
    RETURN_NONE,
    LiftedCall,
    Part,
    Result,
    argument_name,
    check_arraylike,
    is_arraylike,
    parts_of,
    write_back,
)
from pax_export.transforms._rng_split import SplitRngs, is_stacked
from pax_export.transforms._sharding import PARTITION_NAME, with_stacked_axis, without_stacked_axis

Axes = list[int | None]
T = TypeVar("T")
#: An axis for all leaves below it, or one for each part.
AxisPrefix: TypeAlias = "int | StateAxes | Sequence[AxisPrefix] | Mapping[str, AxisPrefix] | None"


class StateAxes(Mapping):
    """The axes along which the leaves of a module are mapped.

    Args:
        axes: an ordered mapping from filters to axes; the first filter that selects a leaf applies.
             Leaves with None or without a filter are not mapped: all calls share them.

    Raises:
        InvalidArgumentTypeError: (a TypeError) a key is not a filter.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> axes = T.StateAxes({"bias": None, T.Param: 0})
        >>> layers = pax.Linear(2, 3).replace(weight=jnp.ones((5, 2, 3)))
        >>> T.vmap(lambda net, x: net(x), in_axes=(axes, None))(layers, jnp.ones((1, 2))).shape
        (5, 1, 3)
    """

    def __init__(self, axes: Mapping[Any, int | None]):
        self._axes = {
            key: None if axis is None else operator.index(axis) for key, axis in axes.items()
        }
        self._key = static_key(tuple(self._axes.items()))  # predicates count by their code
        self._rules = tuple([(as_filter(key), axis) for key, axis in self._axes.items()])

    def __getitem__(self, key: Hashable) -> int | None:
        return self._axes[key]

    def __iter__(self) -> Any:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateAxes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"StateAxes({self._axes!r})"

    def __reduce__(self) -> Any:
        return StateAxes, (self._axes,)

    def of(self, module: Node) -> Axes:
        """The axis of each leaf of a module."""
        axes: Axes = [None] * len(tree_leaves(module))
        found = [False] * len(axes)
        for select, axis in self._rules:
            for i, chosen in enumerate(select(module)):
                if chosen and not found[i]:
                    found[i], axes[i] = True, axis
        return axes

    def require_names(self, modules: list[Any], where: str) -> None:
        """Raises for a filter that names no part of these modules, or that never applies."""
        if not any(map(has_names, self)):
            return
        require_names(list(self), modules, where)
        chosen = [[x for module in modules for x in select(module)] for select, _ in self._rules]
        for number, (name, axis) in enumerate(self.items()):
            left = [i for i, is_meant in enumerate(chosen[number]) if is_meant]
            before = {
                next((x for x, rule in zip(self.values(), chosen[:number]) if rule[i]), axis)
                for i in left
            }
            if left and axis not in before and has_names(name):
                raise InvalidArgumentError(
                    "A filter never applies: earlier ones select all its leaves.",
                    where=where,
                    got=repr(self),
                    write=f"{name!r} before them",
                )


def is_axis(prefix: AxisPrefix) -> bool:
    """True for a prefix of a subtree: an axis, None or a `StateAxes`."""
    if prefix is None or isinstance(prefix, StateAxes):
        return True
    return isinstance(prefix, int) and not isinstance(prefix, bool)


Prefixes = list[tuple[Any, Any]]  # for each outermost module: its axis or `StateAxes`, and it


def axes_of(
    prefix: AxisPrefix, tree: PyTree, state_axes: StateAxes | None, where: str, prefixes: Prefixes
) -> Axes:
    """The axis of each leaf, in a tree like the top of `tree`; ``state_axes`` govern modules.

    Appends to `prefixes` for each outermost module.
    """
    if is_node(tree):
        prefixes.append((prefix, tree))
        prefixes = []  # modules in it are a part of it
        if state_axes is not None and not isinstance(prefix, StateAxes):
            return state_axes.of(tree)
    if is_axis(prefix):
        parts = parts_of(tree)
        prefixes += [(prefix, part.value) for part in parts if part.is_module]
        return [axis for part in parts for axis in _of_part(prefix, part, state_axes)]
    if not isinstance(prefix, EmptyNode) and not jax.tree_util.all_leaves([prefix]):
        is_other = isinstance(prefix, list) and isinstance(tree, tuple)
        items, level = one_level(tuple(prefix) if is_other else prefix)  # type: ignore[arg-type]
        below, level_of_tree = one_level(tree)
        if level == level_of_tree:
            return [
                axis
                for (path, entry), (_, value) in zip(items, below)
                for axis in axes_of(
                    entry, value, state_axes, f"{where}.{path_name(path)}", prefixes
                )
            ]
    raise InvalidArgumentError(
        "Axes must be an integer, None, StateAxes, or a tree of these that follows the argument.",
        where=where,
        got=f"{prefix!r} for {type(tree).__name__}"[:200],
        write="one axis for the whole argument, or one for each of its parts",
    )


def _of_part(prefix: Any, part: Part, state_axes: StateAxes | None) -> Axes:
    if isinstance(prefix, StateAxes):
        return prefix.of(part.value) if part.is_module else [None]
    if part.is_module and state_axes is not None:
        return state_axes.of(part.value)
    return [prefix] * (part.stop - part.start)


# --- options ----------------------------------------------------------------------------


class MapOptions:
    """The options that vmap and scan have in common, checked as far as possible before a call."""

    def __init__(
        self,
        transform: str,  # its name, for messages
        *,
        in_axes: AxisPrefix,
        in_axes_kwargs: AxisPrefix,
        out_axes: AxisPrefix,
        state_axes: Mapping[Any, int | None] | None,
        split_rngs: Selector,
        transform_metadata: Mapping[str, Any] | tuple,
        **others: object,
    ):
        self.transform, self.out_axes = transform, out_axes
        self.in_axes: Any = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        self.in_axes_kwargs: Any = in_axes_kwargs
        if state_axes is not None and not isinstance(state_axes, StateAxes):
            state_axes = StateAxes(state_axes)
        self.state_axes = state_axes
        metadata = dict(transform_metadata)
        for key in metadata:
            if key != PARTITION_NAME:
                raise InvalidArgumentError(
                    f"{transform}: transform_metadata has an unknown key.",
                    where="transform_metadata",
                    got=repr(key),
                    write="{PARTITION_NAME: ...}",
                )
        # The name of the stacked axis in partition specs.
        self.axis_label: str | None = metadata.get(PARTITION_NAME)
        self.split = SplitRngs(split_rngs)

    def prefix_of(self, argument: int | str) -> Any:
        """The entry of in_axes for a positional argument or a keyword."""
        axes = self.in_axes_kwargs if isinstance(argument, str) else self.in_axes
        return axes if is_axis(axes) else axes[argument]

    def require_entries(self, count: int, names: Set[str]) -> None:
        """Raises unless there is one axis for all arguments, or an entry for each."""
        axes, named = self.in_axes, self.in_axes_kwargs
        if not is_axis(axes) and len(axes) != count:
            entries = "1 entry" if len(axes) == 1 else f"{len(axes)} entries"
            raise InvalidArgumentError(
                f"{self.transform}: in_axes has {entries} for "
                f"{count} argument{'' if count == 1 else 's'}.",
                got=f"in_axes={axes!r}"[:200],
                write="one entry for each positional argument, or one integer for all",
            )
        if not is_axis(named) and named.keys() != set(names):
            wrong = sorted(names - named.keys()) or sorted(named.keys() - names)
            raise InvalidArgumentError(
                f"{self.transform}: in_axes_kwargs has no entry for a keyword argument, or one for "
                "an argument that the call does not have.",
                where=", ".join(wrong),
                got=f"in_axes_kwargs={named!r}"[:200],
                write="in_axes_kwargs={..., name: 0} of each keyword argument, or one axis for all",
            )


# --- arguments --------------------------------------------------------------------------


@dataclass(eq=False)
class Slot:
    """One leaf of the arguments."""

    number: int  # which leaf of the call
    name: str  # the argument's name, for messages
    value: Any
    axis: int | None  # along which it is mapped
    root: int | None = None  # to which module of the arguments it belongs
    path: tuple = ()  # the path in the argument
    is_key: bool = False  # whether it is a random key of a module
    split: bool = False  # whether that key is to be split, being no array of keys that is mapped


@dataclass(eq=False)
class MappedArguments:
    """The arguments of a call."""

    call: LiftedCall  # for modules whose specs lack the mapped axis
    slots: list[Slot]  # one for each leaf
    prefixes: Prefixes


def inputs_of(
    function: Callable, args: tuple, kwargs: dict, options: MapOptions, carried: int | None = None
) -> MappedArguments:
    """Takes a call apart; the leaves of the argument that a scan carries have no axes."""
    options.require_entries(len(args), kwargs.keys())
    items = [(i, value) for i, value in enumerate(args)] + sorted(kwargs.items())
    prefixes: Prefixes = []
    axes: Axes = []
    for argument, value in items:
        if argument == carried and isinstance(argument, int):
            prefix, where = StateAxes({}), ""
        else:
            prefix = options.prefix_of(argument)
            where = (
                f"in_axes[{argument}]"
                if isinstance(argument, int)
                else f"in_axes_kwargs[{argument!r}]"
            )
        axes += axes_of(prefix, value, options.state_axes, where, prefixes)
    parts = parts_of((args, kwargs))
    slots = _make_slots(parts, axes, options)
    mapped = [slot.axis for slot in slots]
    inner, keywords = _map_modules(without_stacked_axis, (args, kwargs), mapped)
    roots = [part.value for part in parts if part.is_module]
    call = LiftedCall(function, inner, keywords, roots=roots)
    return MappedArguments(call, slots, prefixes)


def _make_slots(parts: list[Part], axes: Axes, options: MapOptions) -> list[Slot]:
    slots: list[Slot] = []
    for part in parts:
        if not part.is_module:
            name = argument_name(part.path)
            slots.append(Slot(part.start, name, part.value, axes[part.start]))
            continue
        leaves = leaves_of(part.value)
        split = options.split.rule(part.value, leaves)
        for number, leaf in enumerate(leaves, part.start):
            axis, is_key = axes[number], is_random_key(leaf)
            slot = Slot(number, leaf.name, leaf.value, axis, part.root, leaf.path, is_key)
            if is_key and (axis is None or not is_stacked(leaf.value)):
                slot.axis, slot.split = None, split[number - part.start]
            slots.append(slot)
    return slots


def _map_modules(change: Callable[[Any, list[Any]], Any], tree: T, axes: Sequence[int | None]) -> T:
    """Changes each module of a tree, given the axes of its leaves."""
    left = iter(axes)

    def visit(value: T) -> T:
        own = [next(left) for _ in tree_leaves(value)]
        return change(value, own) if is_node(value) else value

    return tree_map(visit, tree, is_leaf=is_node)


# --- sizes ------------------------------------------------------------------------------


def checked_size(value: SupportsIndex | None, where: str) -> Any:
    """A number of calls, or None; it may be a symbolic dimension."""
    if value is None or jax.export.is_symbolic_dim(value):  # type: ignore[arg-type]
        return value
    name = where.split(".")[-1]
    return checked_integer(value, where, least=0, write=f"{name}=3")


def check_axis_fits(
    transform: str, axis: int, rank: int, shape: tuple[int, ...], where: str
) -> None:
    """Raises unless an array with as many axes has this one."""
    if not -rank <= axis < rank:
        raise InvalidArgumentError(
            f"{transform}: axis out of bounds.",
            where=where,
            got=f"axis {axis} for shape {shape}",
            write=f"an axis from {-rank} to {rank - 1}",
        )


def mapped_size(
    inputs: MappedArguments, value_of_option: int | None, option: str, options: MapOptions
) -> Any:
    """The number of calls: the common length of the mapped axes, or the user's ``given``."""
    transform = options.transform
    sizes: dict[Any, str] = {}
    for slot in inputs.slots:
        if slot.axis is not None:
            sizes.setdefault(_axis_length(slot, transform), slot.name)
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise InvalidArgumentError(
            f"{transform}: inconsistent lengths of the mapped axes.",
            where=f"{first} and {second}",
            got=f"{one} and {other}",
            write="None in in_axes, or in state_axes, for unmapped values",
        )
    if not sizes and value_of_option is None:
        _require_axes_by_name(inputs.prefixes, options)
        raise InvalidArgumentError(
            f"{transform}: cannot infer the number of calls: nothing is mapped.",
            write=f"pass {option}=...",
        )
    inferred = next(iter(sizes), value_of_option)
    if value_of_option is not None and value_of_option != inferred:
        raise InvalidArgumentError(
            f"{transform}: given {option} {value_of_option} but inferred {inferred}.",
            where=sizes[inferred],
            write=f"{option}={inferred}, or none at all",
        )
    return inferred


def _axis_length(slot: Slot, transform: str) -> Any:
    shape = jnp.shape(slot.value) if is_arraylike(slot.value) else ()
    if not shape:
        raise InvalidArgumentError(
            f"{transform}: a scalar cannot be mapped.",
            where=slot.name,
            got=f"{type(slot.value).__name__} and axis {slot.axis}",
            write="None in in_axes for it",
        )
    axis = slot.axis or 0
    check_axis_fits(transform, axis, len(shape), shape, slot.name)
    return shape[axis]


# --- results ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """How one leaf of a result is returned."""

    name: str  # the leaf's path, for messages
    axis: int | None  # where to stack it; None if it is not covered by any axis
    is_key: bool  # whether it is a random key of a module
    source: Slot | None  # the leaf at its place in the module of the arguments that this is
    in_module: bool


def targets_of(result: Result, inputs: MappedArguments, options: MapOptions) -> list[Target]:
    """Returns the target of each leaf of a result, in order."""
    value, finals = result.treedef.unflatten(result.leaves)
    prefixes = list(inputs.prefixes)
    axes = axes_of(options.out_axes, value, options.state_axes, "out_axes", prefixes)
    for number, final in finals.items():
        prefix, _ = inputs.prefixes[number]
        axes += axes_of(prefix, final, options.state_axes, f"in_axes[{number}]", prefixes)
    _require_axes_by_name(prefixes, options)
    modules = [part.value for part in [*inputs.call.parts, *result.parts] if part.is_module]
    options.split.require_names(modules, f"{options.transform}.split_rngs")
    targets: list[Target] = []
    for part, root in zip(result.parts, result.roots):
        if not part.is_module:
            name = path_name(part.path[1:])
            targets.append(Target(join_path("output", name), axes[part.start], False, None, False))
            continue
        slots = inputs.slots if root is not None else ()
        by_path = {slot.path: slot for slot in slots if slot.root == root}
        for axis, leaf in zip(axes[part.start :], leaves_of(part.value)):
            source = by_path.get(leaf.path)
            targets.append(Target(leaf.name, axis, is_random_key(leaf), source, True))
    for leaf, target in zip(result.leaves, targets):
        _check_result(leaf, target, options.transform)
    return targets


def _require_axes_by_name(prefixes: Prefixes, options: MapOptions) -> None:
    """Raises if `StateAxes` name a part that none of the modules with these axes has."""
    governed: dict[StateAxes, list[Any]] = {}
    for prefix, module in prefixes:
        axes = prefix if isinstance(prefix, StateAxes) else options.state_axes
        if axes is not None:
            governed.setdefault(axes, []).append(module)
    for axes, modules in governed.items():
        axes.require_names(modules, f"{options.transform}.state_axes")


def _check_result(leaf: ArrayLike, target: Target, transform: str) -> None:
    where = target.name.rstrip(".")
    what = f"{transform}: the function must return arrays, numbers or modules."
    check_arraylike(leaf, what, where, RETURN_NONE)
    if target.axis is not None:
        shape = jnp.shape(leaf)
        check_axis_fits(transform, target.axis, len(shape) + 1, shape, where)


def not_covered(target: Target, transform: str) -> UncoveredStateError:
    """The error about a leaf that differs from call to call."""
    if not target.in_module:
        name = target.name.rstrip(".")
        return UncoveredStateError(
            f"{transform}: {name} differs from call to call, but its axis is None.",
            where="out_axes",
            write="an axis to stack it along",
        )
    return UncoveredStateError(
        f"{transform}: {target.name} is not covered by state_axes and may differ between calls.",
        where=target.name,
        write=f"state_axes={{..., {target.name.rsplit('.', 1)[-1]!r}: 0}} to stack it"
        + (", or make it the same in all calls (jax.lax.pmean)" if transform == "vmap" else ""),
    )


def finish_result(
    inputs: MappedArguments,
    result: Result,
    leaves: list[Any],
    axes: Sequence[int | None],
    label: str | None,
) -> Any:
    """The value for the caller; the specs of leaves stacked at these axes name the new one."""
    tree = result.treedef.unflatten(leaves)
    value, finals = _map_modules(lambda m, own: with_stacked_axis(m, own, label), tree, axes)
    return write_back(inputs.call.roots, value, finals.values(), result.origins)
