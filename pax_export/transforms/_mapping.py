"""What vmap and scan share: arguments whose leaves have axes, results that get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UncoveredStateError,
)
from pax_export.core import is_node, join, path_name
from pax_export.transforms._filters import leaves_of
from pax_export.transforms._lift import Call, Part, Result, finish, roots_of
from pax_export.transforms._rng_fold import SplitRngs, is_stacked, key_mask
from pax_export.transforms._sharding import (
    PARTITION_NAME,
    positive_axis,
    with_stacked_axis,
    without_stacked_axis,
)
from pax_export.transforms._state_axes import Axes, StateAxes, axes_of, is_axis


@dataclass(frozen=True)
class MapOptions:
    """The options that vmap and scan have in common, checked."""

    transform: str
    in_axes: Any
    in_axes_kwargs: Any
    out_axes: Any
    state_axes: StateAxes | None
    split: SplitRngs
    axis_label: str | None

    def prefix_of(self, place: int | str, count: int) -> Any:
        """The entry of in_axes for a positional argument or a keyword."""
        axes = self.in_axes_kwargs if isinstance(place, str) else self.in_axes
        if is_axis(axes):
            return axes
        if isinstance(place, str):
            return axes[place]
        if len(axes) != count:
            raise InvalidArgumentError(
                f"{self.transform}: in_axes has {_entries(len(axes))} for "
                f"{count} argument{'' if count == 1 else 's'}.",
                got=f"in_axes={axes!r}"[:200],
                write="one entry for each positional argument, or one integer for all",
            )
        return axes[place]


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def options_of(
    transform: str,
    in_axes: Any,
    in_axes_kwargs: Any,
    out_axes: Any,
    state_axes: StateAxes | None,
    split_rngs: Any,
    metadata: Mapping[str, Any],
) -> MapOptions:
    """Checks what can be checked before a call."""
    if not is_axis(in_axes) and not isinstance(in_axes, (tuple, list)):
        raise _no_axes(
            transform, "in_axes", in_axes, "0, None, or a tuple with one for each argument"
        )
    if not is_axis(in_axes_kwargs) and not isinstance(in_axes_kwargs, Mapping):
        raise _no_axes(transform, "in_axes_kwargs", in_axes_kwargs, "0, None, or a dict of these")
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    label = metadata.get(PARTITION_NAME)
    split = SplitRngs(split_rngs)
    return MapOptions(transform, in_axes, in_axes_kwargs, out_axes, state_axes, split, label)


def _no_axes(transform: str, name: str, value: Any, write: str) -> InvalidArgumentTypeError:
    return InvalidArgumentTypeError(
        f"{transform}: {name} holds integers, None or StateAxes.",
        got=f"{name}={value!r}"[:200],
        write=f"{name}={write}",
    )


@dataclass(eq=False)
class Slot:
    """One leaf of the arguments.

    Attributes:
        number: which leaf of the call.
        name: where it stands, for messages.
        value: the leaf.
        axis: along which it is mapped, or None.
        in_module: whether it belongs to a module.
        is_key: whether it is a random key of a module.
        split: whether that key is to be split, being no array of keys that is mapped.
    """

    number: int
    name: str
    value: Any
    axis: int | None
    in_module: bool
    is_key: bool = False
    split: bool = False


@dataclass(eq=False)
class Inputs:
    """The arguments of a call: the call, its slots, the prefix of each root.

    Attributes:
        call: the call, on modules whose specs lack the mapped axis.
        slots: one for each leaf.
        prefixes: for each root module, what says its axes.
        starts: for each root module, the number of its first leaf.
    """

    call: Call
    slots: list[Slot]
    prefixes: list[Any]
    starts: list[int] = field(default_factory=list)


def inputs_of(
    function: Callable,
    args: Sequence[Any],
    kwargs: dict,
    options: MapOptions,
    strict: bool,
    carried: int | None = None,
) -> Inputs:
    """Takes a call apart.

    Args:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: the options.
        strict: as for `Call`.
        carried: the argument that a scan carries; its leaves have no axes.
    """
    items = [(i, value) for i, value in enumerate(args)] + sorted(kwargs.items())
    prefixes, axes = [], []
    for place, value in items:
        if place == carried and isinstance(place, int):
            prefix, own = None, [None] * len(jax.tree_util.tree_leaves(value))
        else:
            prefix = options.prefix_of(place, len(args))
            where = f"in_axes[{place}]" if isinstance(place, int) else f"in_axes_kwargs[{place!r}]"
            own = axes_of(prefix, value, options.state_axes, where)
        prefixes += [prefix] * len(roots_of(value))
        axes += own
    roots = roots_of((tuple(args), kwargs))
    slots = _slots(Call(function, tuple(args), kwargs).parts, axes, options)
    inner, keywords = _without_axis((tuple(args), kwargs), slots)
    call = Call(function, inner, keywords, strict=strict, roots=roots)
    starts = [part.start for part in call.parts if part.is_module]
    return Inputs(call, slots, prefixes, starts)


def _slots(parts: list[Part], axes: Axes, options: MapOptions) -> list[Slot]:
    slots = []
    for part in parts:
        name = argument_name(part.path)
        if not part.is_module:
            slots.append(Slot(part.start, name, part.value, axes[part.start], False))
            continue
        keys, split = key_mask(part.value), options.split.of(part.value)
        for at, leaf in enumerate(leaves_of(part.value)):
            slot = Slot(
                part.start + at, leaf.name, leaf.value, axes[part.start + at], True, keys[at]
            )
            if slot.is_key and (slot.axis is None or not is_stacked(slot.value)):
                slot.axis, slot.split = None, split[at]
            slots.append(slot)
    return slots


def argument_name(path: tuple) -> str:
    """``argument 2``, ``argument 'mask'``, or a path below one of these."""
    first = path[1]
    place = f"argument {first.idx if hasattr(first, 'idx') else repr(first.key)}"
    return f"{place}, {path_name(path[2:])}" if len(path) > 2 else place


def _without_axis(tree: Any, slots: list[Slot]) -> Any:
    left = iter(slots)

    def strip(value: Any) -> Any:
        if not is_node(value):
            next(left)
            return value
        own = [next(left) for _ in jax.tree_util.tree_leaves(value)]
        return without_stacked_axis(value, [positive_axis(s.axis, s.value) for s in own])

    return jax.tree_util.tree_map(strip, tree, is_leaf=is_node)


# --- sizes ------------------------------------------------------------------------------


def mapped_size(slots: list[Slot], given: Any, option: str, transform: str) -> Any:
    """How often the function is called: the common length of what is mapped.

    Args:
        slots: the leaves.
        given: what the user said, or None.
        option: how the user says it, ``axis_size`` or ``length``.
        transform: for messages.
    """
    sizes: dict[Any, str] = {}
    for slot in slots:
        if slot.axis is not None:
            sizes.setdefault(_length(slot, transform), slot.name)
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise InvalidArgumentError(
            f"{transform}: inconsistent lengths of the mapped axes.",
            where=f"{first} and {second}",
            got=f"{one} and {other}",
            write="None in in_axes, or in state_axes, for what is not mapped",
        )
    if not sizes and given is None:
        raise InvalidArgumentError(
            f"{transform}: cannot infer how many calls to make: nothing is mapped.",
            write=f"pass {option}=...",
        )
    inferred = next(iter(sizes), given)
    if given is not None and given != inferred:
        raise InvalidArgumentError(
            f"{transform}: given {option} {given} but inferred {inferred}.",
            where=sizes[inferred],
            write=f"{option}={inferred}, or none at all",
        )
    return inferred


def _length(slot: Slot, transform: str) -> Any:
    shape = jnp.shape(slot.value) if _is_arraylike(slot.value) else ()
    if not shape:
        raise InvalidArgumentError(
            f"{transform}: a scalar cannot be mapped.",
            where=slot.name,
            got=f"{type(slot.value).__name__} and axis {slot.axis}",
            write="None in in_axes for it",
        )
    axis = slot.axis or 0
    if not -len(shape) <= axis < len(shape):
        raise InvalidArgumentError(
            f"{transform}: axis out of bounds.",
            where=slot.name,
            got=f"axis {axis} for shape {shape}",
            write=f"an axis from {-len(shape)} to {len(shape) - 1}",
        )
    return shape[axis]


def _is_arraylike(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, (int, float, complex))


# --- results ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What becomes of one leaf of a result.

    Attributes:
        name: where it stands, for messages.
        axis: where to stack it; None if it is not covered by any axis.
        is_key: whether it is a random key of a module.
        source: the leaf of the arguments that stands at its place, if it
            belongs to a module of the arguments.
        in_module: whether it belongs to a module.
    """

    name: str
    axis: int | None
    is_key: bool
    source: Slot | None
    in_module: bool


def targets_of(result: Result, inputs: Inputs, options: MapOptions) -> list[Target]:
    """What becomes of each leaf of a result, in order."""
    value, finals = result.treedef.unflatten(result.leaves)
    axes = axes_of(options.out_axes, value, options.state_axes, "out_axes")
    for number, final in finals.items():
        axes += axes_of(inputs.prefixes[number], final, options.state_axes, f"in_axes[{number}]")
    targets: list[Target] = []
    for part, root in zip(result.parts, result.roots):
        if not part.is_module:
            name = path_name(part.path[1:])
            targets.append(Target(join("output", name), axes[part.start], False, None, False))
            continue
        given = _by_path(inputs, root)
        keys = key_mask(part.value)
        for at, leaf in enumerate(leaves_of(part.value)):
            axis, source = axes[part.start + at], given.get(leaf.path)
            targets.append(Target(leaf.name, axis, keys[at], source, True))
    return targets


def _by_path(inputs: Inputs, root: int | None) -> dict[tuple, Slot]:
    if root is None:
        return {}
    start = inputs.starts[root]
    given = inputs.call.treedef.unflatten(inputs.call.leaves)
    leaves = leaves_of(roots_of(given)[root])
    return {leaf.path: inputs.slots[start + at] for at, leaf in enumerate(leaves)}


def not_covered(target: Target, transform: str) -> UncoveredStateError:
    """The error about a leaf that differs from call to call."""
    if not target.in_module:
        return UncoveredStateError(
            f"{transform}: {target.name} differs from call to call, but its axis is None.",
            where="out_axes",
            write="an axis to stack it along",
        )
    return UncoveredStateError(
        f"{transform}: {target.name} is not covered by state_axes and may differ between calls.",
        where=target.name,
        write=f"state_axes={{..., {target.name.rsplit('.', 1)[-1]!r}: 0}} to stack it"
        + (", or make it the same in all calls (jax.lax.pmean)" if transform == "vmap" else ""),
    )


def finished(
    inputs: Inputs, result: Result, leaves: list[Any], axes: Sequence[int | None], label: str | None
) -> Any:
    """The value for the caller; the specs of stacked leaves name the new axis.

    Args:
        inputs: the arguments.
        result: what the call left.
        leaves: the leaves of the result.
        axes: where each was stacked, or None.
        label: the name of the axis in specs.
    """
    tree = result.treedef.unflatten(leaves)
    left = iter(zip(leaves, axes))

    def insert(value: Any) -> Any:
        if not is_node(value):
            next(left)
            return value
        own = [next(left) for _ in jax.tree_util.tree_leaves(value)]
        return with_stacked_axis(value, [positive_axis(axis, leaf) for leaf, axis in own], label)

    tree = jax.tree_util.tree_map(insert, tree, is_leaf=is_node)
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    return finish(inputs.call.roots, treedef, result.origins, leaves)
