"""vmap for functions of modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from pax_export.core import Module, Selector
from pax_export.transforms._axes import (
    AxisPrefix,
    MapOptions,
    MappedArguments,
    Target,
    checked_size,
    finish_result,
    inputs_of,
    mapped_size,
    not_covered,
    targets_of,
)
from pax_export.transforms._lift import Result, wrap_like
from pax_export.transforms._remat import TransformedLayer
from pax_export.transforms._rng_split import split_for

P = ParamSpec("P")
R = TypeVar("R")
Leaves: TypeAlias = dict[int, Any]  # of the arguments, by number


def vmap(
    f: Callable[P, R],
    *,
    in_axes: AxisPrefix = 0,
    out_axes: AxisPrefix = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable = None,
    in_axes_kwargs: AxisPrefix = 0,
    state_axes: Mapping[Any, int | None] | None = None,
    split_rngs: Selector = ...,
    transform_metadata: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[P, R]:
    """Makes a function that calls another one for every index of an axis, in parallel.

    Args:
        f: takes arrays and modules of one call; or a layer, which makes another layer: all calls
            share its arrays.  A bound method is captured, and its module is immutable.
        in_axes: the axis along which each positional argument is mapped, None
            for one that all calls share: a single entry for all, or a tuple.
            An entry may be `StateAxes`, for a module.
        out_axes: the axis along which results are stacked; None for results that are equal in all
            calls.
        axis_name: a name for collectives such as `jax.lax.pmean`.
        axis_size: the number of calls, if nothing is mapped.
        spmd_axis_name: as in `jax.vmap`.
        in_axes_kwargs: the same as ``in_axes`` for keyword arguments: one
            entry, or a dict.
        state_axes: an ordered mapping from filters to axes.  If given, it alone
            says how leaves of modules are mapped and stacked; those that no
            filter selects are shared, and must come out the same.
        split_rngs: a filter that selects the random keys that are split, so
            that each call has its own.  It selects keys of modules that are not
            mapped, and by the tag ``"params"`` the ambient stream.  A key of a
            module that is split comes back as one key, advanced once.
        transform_metadata: ``{PARTITION_NAME: name}`` names the stacked axis in
            partition specs.

    Returns:
        A function of the same arguments with one axis more.

    Raises:
        InvalidArgumentError: (a ValueError, when called) axes that do not fit.
        UncoveredStateError: (a ValueError, when called) a leaf of a module
            differs from call to call, and has no axis.
        InvalidArgumentTypeError: (a TypeError) an argument is not an axis or filter.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> nets = T.vmap(lambda: pax.Linear(3, 4), axis_size=5)()
        >>> T.vmap(lambda net, x: net(x), in_axes=(0, None))(nets, jnp.ones((2, 3))).shape
        (5, 2, 4)
    """
    axis_size = checked_size(axis_size, "vmap.axis_size")
    own = {
        "in_axes": in_axes, "in_axes_kwargs": in_axes_kwargs, "out_axes": out_axes,
        "state_axes": state_axes, "split_rngs": split_rngs,
        "transform_metadata": transform_metadata,
    }  # fmt: skip
    names = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
    if isinstance(f, Module):
        return TransformedLayer(f, vmap, {**own, **names, "axis_size": axis_size})
    options = MapOptions("vmap", **own)

    @wrap_like(f)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        inputs = inputs_of(f, args, kwargs, options)
        size = mapped_size(inputs, axis_size, "axis_size", options)
        run = _Run(inputs, options, size, names)
        try:
            stacked, shared = run.of_all(run.one_call, (0, None))
        except ValueError as error:
            explained = run.explain_error(error)
            if explained is None:
                raise
            raise explained from None
        return run.collect_results(stacked, shared)

    return mapped


class _Run:
    """One call of a mapped function, from its leaves to its result."""

    result: Result
    targets: list[Target] | None = None  # once the function has been traced
    known: dict[int, Any]  # the leaves of the result that jax need not return

    def __init__(
        self, inputs: MappedArguments, options: MapOptions, size: int, names: dict[str, Any]
    ):
        self.inputs, self.options, self.size, self.names = inputs, options, size, names
        slots = [slot for slot in inputs.slots if slot.axis is not None]
        self.axes = {slot.number: slot.axis for slot in slots}
        self.mapped = {slot.number: slot.value for slot in slots}
        split = [slot for slot in inputs.slots if slot.split]
        pairs = {slot.number: split_for(slot.value, size) for slot in split}
        self.advanced = {number: pair[0] for number, pair in pairs.items()}
        self.keys = {number: pair[1] for number, pair in pairs.items()}

    def of_all(self, one_call: Callable[..., Any], out_axes: AxisPrefix) -> Any:
        """Maps a function of one call over all calls."""
        of_all = jax.vmap(one_call, (self.axes, 0, 0), out_axes, **self.names)
        return of_all(self.mapped, self.keys, jnp.arange(self.size))

    def one_call(
        self, mapped: Leaves, keys: Leaves, index: jax.Array
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """The function that jax maps: returns stacked results and unmapped ones."""
        with self.options.split.folded(index):
            self.result = result = self.inputs.call.inside(mapped | keys)
        targets = targets_of(result, self.inputs, self.options)
        self.targets = [_unstacked_target(target) for target in targets]
        self.known = {}
        stacked, shared = {}, {}
        for i, (leaf, target) in enumerate(zip(result.leaves, self.targets)):
            number, source = result.untouched[i], target.source
            if number is not None and self._comes_back(number, target):
                self.known[i] = self.inputs.call.leaves[number]
            elif source is not None and source.split:
                self.known[i] = self.advanced[source.number]
            elif target.axis is None and not target.is_key:
                shared[_leaf_key(i)] = leaf
            else:
                stacked[i] = leaf
        return stacked, shared

    def _comes_back(self, number: int, target: Target) -> bool:
        """Whether an unchanged leaf of the result is the caller's object."""
        return target.in_module and self.inputs.slots[number].axis == target.axis

    def explain_error(self, error: ValueError) -> Exception | None:
        """Our error for jax's about a result that differs from call to call."""
        if self.targets is None:  # the function itself raised it
            return None
        found = re.search(_leaf_key(r"(\d+)"), str(error))
        number = int(found[1]) if found else self._find_differing()
        return None if number is None else not_covered(self.targets[number], "vmap")

    def _find_differing(self) -> int | None:
        """The first leaf that differs between calls, which jax's message does not name."""
        for number in range(len(self.targets or ())):

            def alone(
                mapped: Leaves, keys: Leaves, index: jax.Array, key: str = _leaf_key(number)
            ) -> Any:
                return self.one_call(mapped, keys, index)[1].get(key)

            try:
                jax.eval_shape(lambda: self.of_all(alone, None))
            except ValueError:
                return number
        return None

    def collect_results(self, stacked: dict[int, Any], shared: dict[str, Any]) -> Any:
        """The result, with leaves at their axes."""
        leaves, targets = dict(self.known), self.targets or []
        for i, target in enumerate(targets):
            if i in stacked:
                axis = target.axis
                leaves[i] = stacked[i][0] if axis is None else jnp.moveaxis(stacked[i], 0, axis)
            elif i not in leaves:
                leaves[i] = shared[_leaf_key(i)]
        in_order = [leaves[i] for i in range(len(leaves))]
        axes = [target.axis for target in targets]
        return finish_result(self.inputs, self.result, in_order, axes, self.options.axis_label)


def _unstacked_target(target: Target) -> Target:
    """Restores a key that was split between the calls."""
    source = target.source
    return replace(target, axis=None) if source is not None and source.split else target


def _leaf_key(number: int | str) -> str:
    """A name of a leaf that is found again in jax's messages."""
    return f"pax_leaf_{number}_"
