"""Preset rules: data parallel, fully sharded, tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pax_export import nn
from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import Spec
from pax_export.nn import Convolution, DenseBlock, PlainDense
from pax_export.sharding._leaf_paths import LeafPath
from pax_export.sharding._mesh import names_in, parts_of
from pax_export.sharding._rules import Match, Rules, Sizes, merge_specs, on_own_axes
from pax_export.sharding._spec_errors import require_axis

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

    Raises:
        InvalidArgumentTypeError: (a TypeError) the axis is not a name, or the size not an integer.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=8)
        >>> rules = pax.sharding.fully_sharded()
        >>> pax.sharding.table(pax.Linear(64, 128), mesh, rules)["weight"].shard_shape
        (64, 16)
    """
    if not isinstance(min_size, int) or isinstance(min_size, bool):
        raise InvalidArgumentTypeError(
            "min_size must be a number of elements.",
            got=f"{type(min_size).__name__}: {min_size!r}",
            write="fully_sharded(min_size=1024)",
        )
    return FullySharded(_check_axis(axis, "fully_sharded"), min_size)


def tensor_parallel(axis: Axis = "model") -> Rules:
    """Returns rules that split the products of this library's layers over the devices.

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
    layer.) Sizes that an axis does not divide are replicated, as the table shows. Layers of other
    classes have no rules.

    Args:
        axis: the mesh axis, or several as one.

    Raises:
        InvalidArgumentTypeError: (a TypeError) the axis is not a name.

    Example:
        >>> import pax_export as pax
        >>> mlp = pax.Sequential(pax.Linear(8, 32), pax.Linear(32, 8))
        >>> mesh = pax.sharding.abstract_mesh(model=4)
        >>> table = pax.sharding.table(mlp, mesh, pax.sharding.tensor_parallel())
        >>> table["modules.0.weight"].shard_shape, table["modules.1.weight"].shard_shape
        ((8, 8), (8, 8))
    """
    return TensorParallel(_check_axis(axis, "tensor_parallel"))


def _check_axis(axis: object, function: str) -> Axis:
    names = axis if isinstance(axis, tuple) else (axis,)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentTypeError(
            "The axis of a mesh must be a name or a tuple of names.",
            got=f"{type(axis).__name__}: {axis!r}"[:120],
            write=f'{function}(axis="data")',
        )
    return axis  # type: ignore[return-value]  # just checked


@dataclass(frozen=True)
class DataParallel(Rules):
    """Every leaf replicated."""

    must_match = False

    def match(self, leaf: LeafPath, sizes: Sizes, taken: Spec) -> Match | None:
        return Match(taken, (self,))

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

    def match(self, leaf: LeafPath, sizes: Sizes, taken: Spec) -> Match | None:
        if leaf.is_key:
            return Match(taken, (self,), "a random key")
        if leaf.size < self.min_size:
            return Match(taken, (self,), f"fewer than {self.min_size} numbers")
        entries = [*taken, *[None] * (len(leaf.shape) - len(taken))]
        free = [i for i in leaf.own_axes if entries[i] is None]
        parts = parts_of(self.axis, sizes)
        fitting = [i for i in free if leaf.shape[i] % parts == 0]
        if not fitting:
            return Match(taken, (self,), f"{parts} divides no axis")
        entries[max(fitting, key=lambda i: (leaf.shape[i], i))] = self.axis
        return Match(tuple(entries), (self,))

    def __str__(self) -> str:
        return "fully_sharded"


@dataclass(frozen=True)
class TensorParallel(AlongAxis):
    """The layers of this library, each in its way."""

    def match(self, leaf: LeafPath, sizes: Sizes, taken: Spec) -> Match | None:
        layout = layout_of(leaf)
        if layout is None:
            return None
        parts = parts_of(self.axis, sizes)
        if layout.units is not None and layout.units % parts:
            return Match(taken, (self,), f"{parts} does not divide {layout.units} heads")
        shape = [leaf.shape[i] for i in leaf.own_axes]
        for axis in layout.axes:
            if -len(shape) <= axis < len(shape) and shape[axis] % parts == 0:
                entries = [None] * len(shape)
                entries[axis] = self.axis  # type: ignore[call-overload]
                return Match(merge_specs(taken, on_own_axes(leaf, tuple(entries))), (self,))
        return Match(taken, (self,), f"{parts} does not divide it" if layout.axes else "")

    def __str__(self) -> str:
        return "tensor_parallel"


# --- how tensor parallel training splits each layer of this library ----------------------


@dataclass(frozen=True)
class Layout:
    """Along which axis a leaf is split; axes are counted from the last, for stacked layers too."""

    axes: tuple[int, ...] = ()  # negative; the first that can be split; none: replicated
    units: int | None = None  # must not be split: the number of heads


#: The axis of a dense layer's weight, [in, out], or of its bias, [out].
_BY_OUTPUT = {"weight": -1, "bias": -1}
_BY_INPUT = {"weight": -2}

#: Modules of several dense layers, by name: devices share each product of two.
_BLOCKS: tuple[tuple[type, dict[str, dict[str, int]]], ...] = (
    (nn.MultiHeadAttention, {
        "query_projection": _BY_OUTPUT, "key_projection": _BY_OUTPUT,
        "value_projection": _BY_OUTPUT, "output_projection": _BY_INPUT}),
    (nn.GroupedQueryAttention, {
        "query": _BY_OUTPUT, "key": _BY_OUTPUT, "value": _BY_OUTPUT, "output": _BY_INPUT}),
    (DenseBlock, {"fc1": _BY_OUTPUT, "fc2": _BY_INPUT}),
    (nn.GatedDense, {"gate": _BY_OUTPUT, "up": _BY_OUTPUT, "down": _BY_INPUT}),
    (PlainDense, {"up": _BY_OUTPUT, "down": _BY_INPUT}),
)  # fmt: skip
_WHOLE = (
    nn.BatchNorm1D, nn.BatchNorm2D, nn.Dropout, nn.EMA, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm,
    nn.RngSeq,
)  # fmt: skip


def layout_of(leaf: LeafPath) -> Layout | None:
    """The layout of the first kind of layer that a leaf belongs to; None if it has none."""
    layouts = (find(leaf) for find in (_layout_of_adapter, _layout_in_block, _layout_in_layer))
    return next((layout for layout in layouts if layout is not None), None)


def _dense_layout(axes: dict[str, int], name: str, units: int | None = None) -> Layout:
    return Layout((axes[name],) if name in axes else (), units)


def _layout_in_block(leaf: LeafPath) -> Layout | None:
    """Attention by heads, which keys and values may have of their own, and blocks of layers."""
    for cls, layers in _BLOCKS:
        owner = next((each for each in reversed(leaf.owners) if isinstance(each.module, cls)), None)
        if owner is not None:
            layer, _, name = leaf.name_in(owner).partition(".")
            heads = "num_kv_heads" if layer in ("key", "value") else "num_heads"
            if layer in layers:
                return _dense_layout(layers[layer], name, getattr(owner.module, heads, None))
    return None


def _layout_in_layer(leaf: LeafPath) -> Layout | None:
    name, layer = leaf.steps[-1], leaf.module
    if isinstance(layer, _WHOLE):
        return Layout()
    if isinstance(layer, nn.Embed):
        return Layout((-2, -1))
    if isinstance(layer, Convolution):
        return _dense_layout({"weight": -2 if _is_transposed(layer) else -1, "bias": -1}, name)
    if not isinstance(layer, nn.Linear):
        return None
    around = leaf.owners[-2].module if len(leaf.owners) > 1 else None
    modules = around.modules if isinstance(around, nn.Sequential) else ()
    dense = [module for module in modules if isinstance(module, nn.Linear)]
    number = next((i for i, module in enumerate(dense) if module is layer), 0)
    return _dense_layout(_BY_INPUT if number % 2 else _BY_OUTPUT, name)  # of a Sequential, in turns


def _layout_of_adapter(leaf: LeafPath) -> Layout | None:
    """Returns the layout of the adapted weight: inputs in ``lora_a``, outputs in ``lora_b``."""
    if leaf.steps[-3:-2] != ("adapters",) or not hasattr(leaf.module, "lora_a"):
        return None
    weight = layout_of(replace(leaf, steps=(*leaf.steps[:-3], "weight"), owners=leaf.owners[:-1]))
    if weight is None or leaf.is_key:
        return weight and Layout()
    inputs, outputs = (-1, -2) if _is_transposed(leaf.owners[-2].module) else (-2, -1)
    if leaf.steps[-1] == "lora_a":
        return Layout((-2,) if weight.axes[:1] == (inputs,) else ())
    return Layout((-1,), weight.units) if weight.axes[:1] == (outputs,) else Layout()


def _is_transposed(layer: Any) -> bool:
    """Whether the weight is ``[..., out, in]``."""
    return isinstance(layer, (nn.Conv1DTranspose, nn.Conv2DTranspose))
