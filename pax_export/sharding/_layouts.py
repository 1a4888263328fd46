"""How tensor parallel training splits each layer of this library.

One function for each kind of layer: it looks at a leaf and says along which of
its axes it is split, or nothing if the leaf is of another kind.  Axes are counted
from the last one, so that they hold for stacked layers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pax_export import nn
from pax_export.nets import DenseBlock
from pax_export.nn import Convolution
from pax_export.sharding._places import Owner, Place


@dataclass(frozen=True)
class Layout:
    """Along which axis a leaf is split.

    Attributes:
        axes: negative; the first that can be split counts.  Empty: replicated.
        units: what must not be cut: the number of heads.
    """

    axes: tuple[int, ...] = ()
    units: int | None = None


#: The axis of a dense layer's weight, [in, out], or of its bias, [out].
_BY_OUTPUT = {"weight": -1, "bias": -1}
_BY_INPUT = {"weight": -2}


def _dense(axes: dict[str, int], name: str, units: int | None = None) -> Layout:
    return Layout((axes[name],) if name in axes else (), units)


def _within(place: Place, cls: type) -> Owner | None:
    """The innermost module of a class around a leaf."""
    owners = [owner for owner in place.owners if isinstance(owner.module, cls)]
    return owners[-1] if owners else None


_PROJECTIONS = {
    "query_projection": _BY_OUTPUT,
    "key_projection": _BY_OUTPUT,
    "value_projection": _BY_OUTPUT,
    "output_projection": _BY_INPUT,
}


def attention(place: Place) -> Layout | None:
    """Query, key and value by heads, output by its input."""
    owner = _within(place, nn.MultiHeadAttention)
    if owner is None:
        return None
    projection, _, name = place.name_in(owner).partition(".")
    if projection not in _PROJECTIONS:
        return None
    return _dense(_PROJECTIONS[projection], name, owner.module.num_heads)


def dense_block(place: Place) -> Layout | None:
    """``fc1`` by its output, ``fc2`` by its input."""
    owner = _within(place, DenseBlock)
    if owner is None:
        return None
    layer, _, name = place.name_in(owner).partition(".")
    return _dense(_BY_OUTPUT if layer == "fc1" else _BY_INPUT, name)


def linear(place: Place) -> Layout | None:
    """In a Sequential every second one by its input, all others by their output."""
    if not place.owners or not isinstance(place.owners[-1].module, nn.Linear):
        return None
    name, layer = place.steps[-1], place.owners[-1].module
    around = place.owners[-2].module if len(place.owners) > 1 else None
    if isinstance(around, nn.Sequential):
        dense = [module for module in around.modules if isinstance(module, nn.Linear)]
        number = next((i for i, module in enumerate(dense) if module is layer), 0)
        if number % 2:
            return _dense(_BY_INPUT, name)
    return _dense(_BY_OUTPUT, name)


def convolution(place: Place) -> Layout | None:
    """By output channels."""
    owner = place.owners[-1].module if place.owners else None
    if not isinstance(owner, Convolution):
        return None
    transposed = isinstance(owner, (nn.Conv1DTranspose, nn.Conv2DTranspose))
    # The weight of a transposed one is [..., out, in].
    return _dense({"weight": -2 if transposed else -1, "bias": -1}, place.steps[-1])


def embed(place: Place) -> Layout | None:
    """By words; where the mesh does not divide them, by the size of a vector."""
    owner = place.owners[-1].module if place.owners else None
    return Layout((-2, -1)) if isinstance(owner, nn.Embed) else None


_WHOLE = (
    nn.BatchNorm1D, nn.BatchNorm2D, nn.Dropout, nn.EMA, nn.GroupNorm, nn.LayerNorm, nn.RngSeq,
)  # fmt: skip


def whole(place: Place) -> Layout | None:
    """What is too small to be split."""
    owner = place.owners[-1].module if place.owners else None
    return Layout() if isinstance(owner, _WHOLE) else None


#: The first that knows a leaf counts.
LAYOUTS: tuple[Callable[[Place], Layout | None], ...] = (
    attention, dense_block, linear, convolution, embed, whole,
)  # fmt: skip
