"""Preset rules: data parallel, fully sharded, tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pax_export import nn
from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import Spec
from pax_export.nn import Convolution, DenseBlock, PlainDense
from pax_export.sharding._leaf_paths import LeafPath, Owner
from pax_export.sharding._mesh import names_in, parts_of
from pax_export.sharding._rules import Match, Rules, Sizes, merged, on_own_axes
from pax_export.sharding._spec_errors import require_axis

Axis = str | tuple[str, ...]


def data_parallel() -> Rules:
    """Rules by which every device holds the whole model; only the batch is split.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=8)
        >>> table = pax.sharding.table(pax.Linear(4, 8), mesh, pax.sharding.data_parallel())
        >>> table.bytes_per_device == table.bytes
        True
    """
    return DataParallel()


def fully_sharded(axis: Axis = "data", min_size: int = 1024) -> Rules:
    """Rules by which each device holds a part of every large array.

    An array is split along its largest axis that the mesh axis divides and that
    is not an axis of stacked layers; the later one of two equally large.  Random keys
    are never split.

    Args:
        axis: the mesh axis, or several as one.
        min_size: an array of fewer numbers is replicated.

    Raises:
        InvalidArgumentTypeError: (a TypeError) the axis is not a name, or the size
            no integer.

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
    return FullySharded(_axis(axis, "fully_sharded"), min_size)


def tensor_parallel(axis: Axis = "model") -> Rules:
    """Rules that split the layers of this library so that devices share each product.

    =======================  ==========================================================
    `MultiHeadAttention`     query, key and value by heads; output by its input
    `GroupedQueryAttention`  the same; keys and values by their own heads
    ``DenseBlock``           of a `Transformer`: ``fc1`` by output, ``fc2`` by input
    `GatedDense`             ``gate`` and ``up`` by output, ``down`` by input
    `Linear` in Sequential   in turns by output and by input
    other `Linear`           by output
    convolutions             by output channels
    `Embed`                  by words, else by the size of a vector
    norms, EMA, dropout      replicated
    adapters of a layer      as its weight: inputs in ``lora_a``, outputs in ``lora_b``
    =======================  ==========================================================

    (That of a Transformer is Megatron's, Shoeybi et al., 2019: two sums over the
    devices in each layer.)  What an axis does not divide is replicated; the table
    says so.  Of layers that are not this library's it says nothing.

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
    return TensorParallel(_axis(axis, "tensor_parallel"))


def _axis(axis: object, function: str) -> Axis:
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
                return Match(merged(taken, on_own_axes(leaf, tuple(entries))), (self,))
        return Match(taken, (self,), f"{parts} does not divide it" if layout.axes else "")

    def __str__(self) -> str:
        return "tensor_parallel"


# --- how tensor parallel training splits each layer of this library ----------------------
#
# One function for each kind of layer: it looks at a leaf and says along which of its axes
# it is split, or nothing if the leaf is of another kind.  Axes are counted from the last
# one, so that they hold for stacked layers, too.


@dataclass(frozen=True)
class Layout:
    """Along which axis a leaf is split."""

    axes: tuple[int, ...] = ()  # negative; the first that can be split; none: replicated
    units: int | None = None  # what must not be cut: the number of heads


#: The axis of a dense layer's weight, [in, out], or of its bias, [out].
_BY_OUTPUT = {"weight": -1, "bias": -1}
_BY_INPUT = {"weight": -2}


def _dense(axes: dict[str, int], name: str, units: int | None = None) -> Layout:
    return Layout((axes[name],) if name in axes else (), units)


def _within(leaf: LeafPath, cls: type) -> Owner | None:
    """The innermost module of a class around a leaf."""
    return next((each for each in reversed(leaf.owners) if isinstance(each.module, cls)), None)


_PROJECTIONS = {
    "query_projection": _BY_OUTPUT,
    "key_projection": _BY_OUTPUT,
    "value_projection": _BY_OUTPUT,
    "output_projection": _BY_INPUT,
}


def attention(leaf: LeafPath) -> Layout | None:
    """Query, key and value by heads, output by its input."""
    owner = _within(leaf, nn.MultiHeadAttention)
    if owner is None:
        return None
    projection, _, name = leaf.name_in(owner).partition(".")
    if projection not in _PROJECTIONS:
        return None
    return _dense(_PROJECTIONS[projection], name, owner.module.num_heads)


_GROUPED = {"query": _BY_OUTPUT, "key": _BY_OUTPUT, "value": _BY_OUTPUT, "output": _BY_INPUT}


def grouped_attention(leaf: LeafPath) -> Layout | None:
    """As `attention`; keys and values have heads of their own."""
    owner = _within(leaf, nn.GroupedQueryAttention)
    if owner is None:
        return None
    projection, _, name = leaf.name_in(owner).partition(".")
    if projection not in _GROUPED:
        return None
    layer: Any = owner.module
    heads = layer.num_kv_heads if projection in ("key", "value") else layer.num_heads
    return _dense(_GROUPED[projection], name, heads)


def gated_dense(leaf: LeafPath) -> Layout | None:
    """``gate`` and ``up`` by their output, ``down`` by its input."""
    owner = _within(leaf, nn.GatedDense) or _within(leaf, PlainDense)
    if owner is None:
        return None
    layer, _, name = leaf.name_in(owner).partition(".")
    return _dense(_BY_INPUT if layer == "down" else _BY_OUTPUT, name)


def dense_block(leaf: LeafPath) -> Layout | None:
    """``fc1`` by its output, ``fc2`` by its input."""
    owner = _within(leaf, DenseBlock)
    if owner is None:
        return None
    layer, _, name = leaf.name_in(owner).partition(".")
    return _dense(_BY_OUTPUT if layer == "fc1" else _BY_INPUT, name)


def linear(leaf: LeafPath) -> Layout | None:
    """In a Sequential every second one by its input, all others by their output."""
    name, layer = leaf.steps[-1], leaf.module
    if not isinstance(layer, nn.Linear):
        return None
    around = leaf.owners[-2].module if len(leaf.owners) > 1 else None
    if isinstance(around, nn.Sequential):
        dense = [module for module in around.modules if isinstance(module, nn.Linear)]
        number = next((i for i, module in enumerate(dense) if module is layer), 0)
        if number % 2:
            return _dense(_BY_INPUT, name)
    return _dense(_BY_OUTPUT, name)


def convolution(leaf: LeafPath) -> Layout | None:
    """By output channels."""
    if not isinstance(leaf.module, Convolution):
        return None
    transposed = isinstance(leaf.module, (nn.Conv1DTranspose, nn.Conv2DTranspose))
    # The weight of a transposed one is [..., out, in].
    return _dense({"weight": -2 if transposed else -1, "bias": -1}, leaf.steps[-1])


def embed(leaf: LeafPath) -> Layout | None:
    """By words; where the mesh does not divide them, by the size of a vector."""
    return Layout((-2, -1)) if isinstance(leaf.module, nn.Embed) else None


_WHOLE = (
    nn.BatchNorm1D, nn.BatchNorm2D, nn.Dropout, nn.EMA, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm,
    nn.RngSeq,
)  # fmt: skip


def adapter(leaf: LeafPath) -> Layout | None:
    """As the weight that it is for: its inputs in ``lora_a``, its outputs in ``lora_b``."""
    if leaf.steps[-3:-2] != ("adapters",) or not hasattr(leaf.module, "lora_a"):
        return None
    layer = leaf.owners[-2].module
    weight = layout_of(replace(leaf, steps=(*leaf.steps[:-3], "weight"), owners=leaf.owners[:-1]))
    if weight is None or leaf.is_key:
        return weight and Layout()
    transposed = isinstance(layer, (nn.Conv1DTranspose, nn.Conv2DTranspose))
    inputs, outputs = (-1, -2) if transposed else (-2, -1)
    if leaf.steps[-1] == "lora_a":
        return Layout((-2,) if weight.axes[:1] == (inputs,) else ())
    return Layout((-1,), weight.units) if weight.axes[:1] == (outputs,) else Layout()


def whole(leaf: LeafPath) -> Layout | None:
    """Describes leaves that are too small to be split."""
    return Layout() if isinstance(leaf.module, _WHOLE) else None


def layout_of(leaf: LeafPath) -> Layout | None:
    """The layout of the first layer class that matches a leaf."""
    kinds = (
        adapter,
        attention,
        grouped_attention,
        dense_block,
        gated_dense,
        linear,
        convolution,
        embed,
        whole,
    )
    return next((layout for kind in kinds if (layout := kind(leaf)) is not None), None)
