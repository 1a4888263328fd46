"""Selects the arrays to quantize, and their contracted axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pax_export._foundations.types import Array, PyTree
from pax_export.core import (
    DeclaredArray,
    declared_in,
    is_array,
    join_path,
    named_leaves,
    named_modules,
)
from pax_export.precision.quantized import ArrayLike

#: Why an array is left.
NO_LAYER = "not a weight of a known layer"


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


def places_of_layers(
    modules: list[tuple[str, Any]],
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
                    yield _place_of(name, found), found


def _place_of(name: str, found: DeclaredArray) -> QuantizableArray:
    is_table = found.declared.role == "table"
    # A row of a table is looked up: its elements share a scale.
    reduced = found.output_axes if is_table else found.input_axes
    inputs = found.axis("in") if "in" in found.axes and not is_table else reduced[-1]
    return QuantizableArray(name, found.array, reduced, inputs, len(found.axes), is_table)


def places_of_tree(params: PyTree) -> Iterator[QuantizableArray]:
    """The arrays of a tree with two axes or more, as ``x @ array`` takes them."""
    is_leaf = lambda each: isinstance(each, ArrayLike)  # noqa: E731
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)[0]:
        if is_leaf(leaf) or is_array(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            reduced = tuple(range(-len(leaf.shape), -1))
            yield QuantizableArray(name, leaf, reduced or (-1,), -2, len(leaf.shape))


def why_not(place: QuantizableArray) -> str:
    """Why an array cannot be quantized; empty if it can."""
    weight = place.weight
    if not is_array(weight):
        return f"{type(weight).__name__}, which is no array"
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        return f"its dtype is {weight.dtype}"
    if len(weight.shape) < 2:
        return "a vector"
    if not place.reduced:
        return "no product of a call takes it"
    if not weight.size:
        return "it has no elements"
    if not _is_finite(weight):
        return "it has NaN or infinite elements"
    return ""


@jax.jit
def _is_finite(weight: Array) -> Any:
    return jnp.isfinite(weight).all()


def other_arrays(net: object, done: set[str]) -> Iterator[tuple[str, str]]:
    """The arrays of a net that are not among those done, and why they are not."""
    for name, leaf in named_leaves(net):
        own = name.removesuffix(".weight")  # of a weight in quantization-aware training
        if not {name, own} & done and is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            rank = len(leaf.shape)
            yield name, "a vector or a number" if rank < 2 else NO_LAYER
