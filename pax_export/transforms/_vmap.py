"""vmap: a function of one example, or one module, made a function of many."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pax_export.transforms._lift import Result, wraps
from pax_export.transforms._mapping import (
    Inputs,
    MapOptions,
    Target,
    finished,
    inputs_of,
    mapped_size,
    not_covered,
    options_of,
    targets_of,
)
from pax_export.transforms._rng_fold import split_for
from pax_export.transforms._state_axes import as_state_axes


def vmap(
    f: Callable[..., Any],
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    in_axes_kwargs: Any = 0,
    state_axes: Mapping[Any, int | None] | None = None,
    split_rngs: Any = ...,
    transform_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Makes a function that calls another one for every index of an axis, at once.

    Args:
        f: takes arrays and modules of one call.  A module or a bound method is
            captured: all calls share it, and none can change it.
        in_axes: the axis along which each positional argument is mapped, None
            for one that all calls share: a single entry for all, or a tuple.
            An entry may be `StateAxes`, for a module.
        out_axes: along which axis results are stacked; None for what is the
            same in all calls.
        axis_name: a name for collectives such as `jax.lax.pmean`.
        axis_size: how many calls, where nothing is mapped.
        spmd_axis_name: as in `jax.vmap`.
        in_axes_kwargs: the same as ``in_axes`` for keyword arguments: one
            entry, or a dict.
        state_axes: an ordered mapping from filters to axes.  If given, it alone
            says how leaves of modules are mapped and stacked; those that no
            filter selects are shared, and must come out the same.
        split_rngs: a filter that selects the random keys that are split, so
            that each call has its own.  It selects keys of modules that are not
            mapped, and by the tag ``"params"`` the ambient stream.
        transform_metadata: ``{PARTITION_NAME: name}`` names the stacked axis in
            partition specs.

    Returns:
        A function of the same arguments with one axis more.

    Raises:
        InvalidArgumentError: (a ValueError, when called) axes that do not fit.
        UncoveredStateError: (a ValueError, when called) a leaf of a module
            differs from call to call, and has no axis.
        InvalidArgumentTypeError: (a TypeError) an argument is no axis or filter.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> nets = T.vmap(lambda: pax.Linear(3, 4), axis_size=5)()
        >>> T.vmap(lambda net, x: net(x), in_axes=(0, None))(nets, jnp.ones((2, 3))).shape
        (5, 2, 4)
    """
    options = options_of(
        "vmap", in_axes, in_axes_kwargs, out_axes, as_state_axes(state_axes), split_rngs,
        transform_metadata,
    )  # fmt: skip
    jax_options = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}

    @wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return call_mapped(f, args, kwargs, options, axis_size, jax_options)

    return mapped


def call_mapped(
    f: Callable,
    args: tuple,
    kwargs: dict,
    options: MapOptions,
    axis_size: int | None,
    jax_options: dict[str, Any],
    strict: bool = False,
) -> Any:
    """One call of a mapped function; ``strict`` as for `Call`."""
    inputs = inputs_of(f, args, kwargs, options, strict)
    size = mapped_size(inputs.slots, axis_size, "axis_size", "vmap")
    run = _Run(inputs, options, size)
    one_call = jax.vmap(run.one_call, in_axes=(run.axes, 0, 0), out_axes=(0, None), **jax_options)
    try:
        stacked, shared = one_call(run.mapped, run.keys, jnp.arange(size))
    except ValueError as error:
        explained = run.explained(error)
        if explained is None:
            raise
        raise explained from None
    return run.finished(stacked, shared)


class _Run:
    """One call of a mapped function, from its leaves to its result."""

    result: Result
    targets: list[Target]
    untouched: list[int | None]

    def __init__(self, inputs: Inputs, options: MapOptions, size: Any):
        self.inputs, self.options = inputs, options
        self.slots = [slot for slot in inputs.slots if slot.axis is not None]
        self.axes = [slot.axis for slot in self.slots]
        self.mapped = [slot.value for slot in self.slots]
        split = [slot for slot in inputs.slots if slot.split]
        pairs = [split_for(slot.value, size) for slot in split]
        self.advanced = {slot.number: pair[0] for slot, pair in zip(split, pairs)}
        self.keys = {slot.number: pair[1] for slot, pair in zip(split, pairs)}

    def one_call(self, mapped: list[Any], keys: dict[int, Any], index: Any) -> tuple[list, dict]:
        """What jax maps."""
        leaves = list(self.inputs.call.leaves)
        for slot, leaf in zip(self.slots, mapped):
            leaves[slot.number] = leaf
        for number, key in keys.items():
            leaves[number] = key
        with self.options.split.folded(index):
            self.result = result = self.inputs.call.inside(leaves)
        self.targets = targets_of(result, self.inputs, self.options)
        self.untouched = [
            number if number is not None and self._comes_back(number, target) else None
            for number, target in zip(result.untouched(leaves), self.targets)
        ]
        stacked, shared = [], {}
        for i, (leaf, target) in enumerate(zip(result.leaves, self.targets)):
            if self.untouched[i] is not None or self._is_advanced(target):
                continue
            if target.axis is None and not target.is_key:
                shared[_key(i)] = leaf
            else:
                stacked.append(leaf)
        return stacked, shared

    def _comes_back(self, number: int, target: Target) -> bool:
        """Whether a leaf that nobody touched is, in the result, what the caller gave."""
        return target.in_module and self.inputs.slots[number].axis == target.axis

    def _is_advanced(self, target: Target) -> bool:
        return target.axis is None and target.source is not None and target.source.split

    def explained(self, error: ValueError) -> Exception | None:
        """Our error for jax's about a result that differs from call to call."""
        found = re.search(_key(r"(\d+)"), str(error))
        return not_covered(self.targets[int(found[1])], "vmap") if found else None

    def finished(self, stacked: list[Any], shared: dict[str, Any]) -> Any:
        """The result, with leaves at their axes."""
        left = iter(stacked)
        leaves = [self._leaf(i, target, left, shared) for i, target in enumerate(self.targets)]
        axes = [target.axis for target in self.targets]
        return finished(self.inputs, self.result, leaves, axes, self.options.axis_label)

    def _leaf(self, i: int, target: Target, stacked: Any, shared: dict[str, Any]) -> Any:
        number = self.untouched[i]
        if number is not None:
            return self.inputs.call.leaves[number]
        if self._is_advanced(target):
            return self.advanced[target.source.number]  # type: ignore[union-attr]
        if _key(i) in shared:
            return shared[_key(i)]
        leaf = next(stacked)
        return leaf[0] if target.axis is None else jnp.moveaxis(leaf, 0, target.axis)


def _key(number: Any) -> str:
    """A name of a leaf that is found again in jax's messages."""
    return f"pax_leaf_{number}_"
