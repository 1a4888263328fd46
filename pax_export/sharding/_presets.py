"""Preset rules: data parallel, fully sharded, tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pax_export.core import Spec, adaptable_arrays, declared_in
from pax_export.sharding._leaf_shardings import require_axis
from pax_export.sharding._mesh import names_in, parts_of
from pax_export.sharding._rules import LeafPath, Match, Rules, Sizes, merge_specs, on_own_axes

Axis = str | tuple[str, ...]


def data_parallel() -> Rules:
    """Returns rules that replicate the model on every device; only the batch is split.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=8)
        >>> table = pax.sharding.table(pax.Linear(4, 8), mesh, pax.sharding.data_parallel())
        >>> table.bytes_per_device == table.bytes
        True
    """
    return DataParallel()


def fully_sharded(axis: Axis = "data", min_size: int = 1024) -> Rules:
    """Returns rules that split every large array over the devices.

    An array is split along its largest axis that is divisible by the mesh axis and is not an axis
    of stacked layers; of two equal ones, along the later. Random keys are never split.

    Args:
        axis: the mesh axis, or several as one.
        min_size: arrays with fewer elements are replicated.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=8)
        >>> rules = pax.sharding.fully_sharded()
        >>> pax.sharding.table(pax.Linear(64, 128), mesh, rules)["weight"].shard_shape
        (64, 16)
    """
    return FullySharded(axis, min_size)


def tensor_parallel(axis: Axis = "model") -> Rules:
    """Returns rules that split the products of layers over the devices.

    What is split follows from the names that layers and blocks give to axes (`pax_export.Declared`,
    ``axes_of_layers``): ``heads``, ``mlp``, ``hidden``, ``vocab`` and ``out``.

    =======================  ==========================================================
    `MultiHeadAttention`     query, key and value by heads; output by its input
    `GroupedQueryAttention`  the same; keys and values by their own heads
    ``DenseBlock``           of a `Transformer`: ``fc1`` by output, ``fc2`` by input
    `GatedDense`             ``gate`` and ``up`` by output, ``down`` by input
    `Linear` in Sequential   alternately by output and by input
    other `Linear`           by output
    convolutions             by output channels
    `Embed`                  by words, or by the size of a vector
    norms, EMA, dropout      replicated
    adapters of a layer      as its weight: inputs in ``lora_a``, outputs in ``lora_b``
    =======================  ==========================================================

    (For a Transformer this is Megatron-LM, Shoeybi et al., 2019: two sums over the devices per
    layer.) Sizes that an axis does not divide are replicated, as the table shows. Layers that
    declare no arrays have no rules.

    Args:
        axis: the mesh axis, or several as one.

    Example:
        >>> import pax_export as pax
        >>> mlp = pax.Sequential(pax.Linear(8, 32), pax.Linear(32, 8))
        >>> mesh = pax.sharding.abstract_mesh(model=4)
        >>> table = pax.sharding.table(mlp, mesh, pax.sharding.tensor_parallel())
        >>> table["modules.0.weight"].shard_shape, table["modules.1.weight"].shard_shape
        ((8, 8), (8, 8))
    """
    return TensorParallel(axis)


@dataclass(frozen=True)
class DataParallel(Rules):
    """Every leaf replicated."""

    must_match = False

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        return Match(before, (self,))

    def __str__(self) -> str:
        return "data_parallel"


@dataclass(frozen=True)
class AlongAxis(Rules):
    """Rules that need an axis of the mesh."""

    axis: Axis

    def bound(self, sizes: Sizes) -> Rules:
        for name in names_in(self.axis):
            require_axis(name, sizes, str(self), f"axis={self.axis!r}")
        return self


@dataclass(frozen=True)
class FullySharded(AlongAxis):
    """Every large leaf split along its largest axis."""

    min_size: int
    must_match = False

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        if leaf.is_key:
            return Match(before, (self,), "a random key")
        if leaf.size < self.min_size:
            return Match(before, (self,), f"fewer than {self.min_size} numbers")
        entries = [*before, *[None] * (len(leaf.shape) - len(before))]
        free = [i for i in leaf.own_axes if entries[i] is None]
        parts = parts_of(self.axis, sizes)
        fitting = [i for i in free if leaf.shape[i] % parts == 0]
        if not fitting:
            return Match(before, (self,), f"{parts} divides no axis")
        entries[max(fitting, key=lambda i: (leaf.shape[i], i))] = self.axis
        return Match(tuple(entries), (self,))

    def __str__(self) -> str:
        return "fully_sharded"


@dataclass(frozen=True)
class TensorParallel(AlongAxis):
    """Layers by the names of their axes."""

    def match(self, leaf: LeafPath, sizes: Sizes, before: Spec) -> Match | None:
        layout = layout_of(leaf)
        if layout is None:
            return None
        parts = parts_of(self.axis, sizes)
        if layout.units is not None and layout.units % parts:
            return Match(before, (self,), f"{parts} does not divide {layout.units} heads")
        shape = [leaf.shape[i] for i in leaf.own_axes]
        for axis in layout.axes:
            if -len(shape) <= axis < len(shape) and shape[axis] % parts == 0:
                entries = [None] * len(shape)
                entries[axis] = self.axis  # type: ignore[call-overload]
                return Match(merge_specs(before, on_own_axes(leaf, tuple(entries))), (self,))
        return Match(before, (self,), f"{parts} does not divide it" if layout.axes else "")

    def __str__(self) -> str:
        return "tensor_parallel"


# --- how tensor parallel training splits a layer -----------------------------------------


@dataclass(frozen=True)
class Layout:
    """Along which axis a leaf is split; axes are counted from the last, for stacked layers too."""

    axes: tuple[int, ...] = ()  # negative; the first that can be split; none: replicated
    units: int | None = None  # must not be split: the number of heads


#: The axes that are split, by name: of two layers in sequence, the one that they share.
_SPLIT = ("heads", "kv_heads", "mlp", "hidden", "vocab", "out")


def layout_of(leaf: LeafPath) -> Layout | None:
    """The layout of a leaf, as its layer declares it; None for a layer that declares nothing."""
    adapter = _layout_of_adapter(leaf)
    if adapter is not None:
        return adapter
    declared = declared_in(leaf.module)
    if not declared:
        return None
    owner = leaf.owners[-1]
    found = declared.get(leaf.steps[owner.depth])
    names, units = _names_in_block(leaf)
    # A part of a quantized array has axes of its own.
    if found is None or len(leaf.steps) > owner.depth + 1:
        return Layout(units=units)
    axes = [names.get(axis, axis) for axis in found.axes]
    split = [n - len(axes) for n, axis in enumerate(axes) if axis in _SPLIT]
    if found.declared.role == "table":
        split += found.output_axes
    return Layout(tuple(split), units)


def _names_in_block(leaf: LeafPath) -> tuple[dict[str, str], int | None]:
    """The names that the block around a layer gives to its axes, and the number of heads."""
    *blocks, layer = leaf.owners
    for block in reversed(blocks):
        path = ".".join(leaf.steps[block.depth : layer.depth])
        names = getattr(block.module, "axes_of_layers", {}).get(path)
        if names is not None:
            counts = [getattr(block.module, f"num_{name}", None) for name in names.values()]
            return names, next((count for count in counts if count is not None), None)
    return {}, None


def _layout_of_adapter(leaf: LeafPath) -> Layout | None:
    """Returns the layout of the adapted weight: inputs in ``lora_a``, outputs in ``lora_b``."""
    if len(leaf.owners) < 2 or not hasattr(leaf.module, "lora_a"):
        return None
    layer = leaf.owners[-2]
    _, _, *array, _ = leaf.steps[layer.depth :]  # "adapters", a name, the array of several, a part
    kernel = adaptable_arrays(layer.module)["".join(array)]
    steps = (*leaf.steps[: layer.depth], kernel.name)
    weight = layout_of(replace(leaf, steps=steps, owners=leaf.owners[:-1]))
    if weight is None:
        return None
    if leaf.steps[-1] == "lora_a":
        return Layout((-2,) if weight.axes[:1] == kernel.input_axes[-1:] else ())
    return Layout((-1,), weight.units) if weight.axes[:1] == kernel.output_axes else Layout()
