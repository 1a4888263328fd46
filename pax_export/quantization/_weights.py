"""The weights of a net that can be quantized, and the net with other arrays in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pax_export._foundations.types import Array, PyTree
from pax_export.adapters import apply_changes, chosen_modules
from pax_export.core import (
    DeclaredArray,
    Module,
    Selector,
    declared_in,
    is_array,
    join_path,
    named_leaves,
    named_modules,
)
from pax_export.precision.quantized import ArrayLike

#: A module, or parameters and their function.
Net: TypeAlias = Module | tuple[Any, Callable[..., Any]]

#: Why an array is left.
NO_LAYER = "not a weight of a known layer"


class Left(NamedTuple):
    """Why an array is not quantized, and its size."""

    why: str
    nbytes: int


class QuantizableArray(NamedTuple):
    """An array that can be quantized.

    Attributes:
        name: the path of the array.
        weight: the array.
        reduced: the contracted axes, counted from the last (-1); the others are channels.
        axis: the contracted axis of the groups.
        rank: the number of axes of one layer; axes before them are those of a scan.
        is_table: whether its rows are looked up.
    """

    name: str
    weight: Any
    reduced: tuple[int, ...]
    axis: int
    rank: int
    is_table: bool = False

    def why_not(self) -> str:
        """Why it cannot be quantized; empty if it can."""
        weight = self.weight
        if not is_array(weight):
            return f"{type(weight).__name__}, which is no array"
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            return f"its dtype is {weight.dtype}"
        if len(weight.shape) < 2:
            return "a vector"
        if not self.reduced:
            return "no product of a call takes it"
        if not weight.size:
            return "it has no elements"
        return "" if _is_finite(weight) else "it has NaN or infinite elements"

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies the last axis of its inputs alone, as `Linear` and 1×1 do."""
        kernel = self.weight.shape[-len(self.reduced) - 1 : -2]
        return self.axis >= -2 and not self.is_table and all(size == 1 for size in kernel)


@jax.jit
def _is_finite(weight: Array) -> Any:
    return jnp.isfinite(weight).all()


def leaves_of(net: Net) -> PyTree:
    """The arrays of a net, as a tree."""
    return net if isinstance(net, Module) else net[0]


class WeightsOfModule:
    """The kernels and tables that layers of a module declare.

    Attributes:
        whole: the net.
        targets: its weights, in the order of the report.
    """

    def __init__(self, net: Module, at: Selector):
        modules = [("", net)] if at is None else chosen_modules(net, at, "quantize")
        self._found = list(_targets_of_layers(modules))
        self.whole, self.targets = net, [target for target, _ in self._found]

    def put(self, arrays: Mapping[str, Any]) -> Module:
        """Returns the net with arrays in place of weights, by name."""
        by_layer: dict[int, dict[str, Any]] = defaultdict(dict)
        for target, own in self._found:
            if target.name in arrays:
                by_layer[id(own.layer)][own.name] = arrays[target.name]
        changes = {layer: partial(_with_arrays, arrays=each) for layer, each in by_layer.items()}
        return apply_changes(self.whole, changes)

    def of_leaves(self, tree: Module) -> Module:
        """Returns the net of a tree like `leaves_of` the net."""
        return tree

    def others(self, done: set[str]) -> Iterator[tuple[str, Left]]:
        """The other arrays of floats, by name."""
        known = {target.name for target, _ in _targets_of_layers([("", self.whole)])}
        for name, leaf in named_leaves(self.whole):
            own = name.removesuffix(".weight")  # of a weight in quantization-aware training
            is_other = not {name, own} & done and is_array(leaf)
            if is_other and jnp.issubdtype(leaf.dtype, jnp.floating):
                why = NO_LAYER if len(leaf.shape) > 1 else "a vector or a number"
                yield name, Left("not chosen" if name in known else why, leaf.nbytes)


def _with_arrays(layer: Module, *, arrays: dict[str, Any]) -> Module:
    return layer.replace(**arrays)


def _targets_of_layers(
    modules: list[tuple[str, Module]],
) -> Iterator[tuple[QuantizableArray, DeclaredArray]]:
    """The kernels and tables that layers in some modules declare."""
    seen = set()
    for path, module in modules:
        for below, layer in named_modules(module):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            for found in declared_in(layer).values():
                if found.declared.role in ("kernel", "table") and found.input_axes:
                    name = join_path(join_path(path, below) if below else path, found.name)
                    yield _target_of(name, found), found


def _target_of(name: str, found: DeclaredArray) -> QuantizableArray:
    is_table = found.declared.role == "table"
    # A row of a table is looked up: its elements share a scale.
    reduced = found.output_axes if is_table else found.input_axes
    inputs = found.axis("in") if "in" in found.axes and not is_table else reduced[-1]
    return QuantizableArray(name, found.array, reduced, inputs, len(found.axes), is_table)


def targets_of_tree(params: PyTree) -> Iterator[QuantizableArray]:
    """The arrays of a tree with two axes or more, as ``x @ array`` takes them."""
    is_leaf = lambda each: isinstance(each, ArrayLike)  # noqa: E731
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)[0]:
        if is_leaf(leaf) or is_array(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            reduced = tuple(range(-len(leaf.shape), -1))
            yield QuantizableArray(name, leaf, reduced or (-1,), -2, len(leaf.shape))
