"""Ready-made rules: data parallel, fully sharded, tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass

from pax_export._errors import InvalidArgumentTypeError
from pax_export.core import Spec
from pax_export.sharding._bad_specs import require_axis
from pax_export.sharding._layouts import LAYOUTS, Layout
from pax_export.sharding._mesh import names_in, parts_of
from pax_export.sharding._places import Place
from pax_export.sharding._rules import Match, Rules, Sizes, merged, on_own_axes

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
    is no axis of stacked layers; the later one of two equally large.  Random keys
    are never split.

    Args:
        axis: the mesh axis, or several as one.
        min_size: an array of fewer numbers is replicated.

    Raises:
        InvalidArgumentTypeError: (a TypeError) the axis is no name, or the size
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
            "min_size is a number of elements.",
            got=f"{type(min_size).__name__}: {min_size!r}",
            write="fully_sharded(min_size=1024)",
        )
    return FullySharded(_axis(axis, "fully_sharded"), min_size)


def tensor_parallel(axis: Axis = "model") -> Rules:
    """Rules that split the layers of this library so that devices share each product.

    =======================  ==========================================================
    `MultiHeadAttention`     query, key and value by heads; output by its input
    ``DenseBlock``           of a `Transformer`: ``fc1`` by output, ``fc2`` by input
    `Linear` in Sequential   in turns by output and by input
    other `Linear`           by output
    convolutions             by output channels
    `Embed`                  by words, else by the size of a vector
    norms, EMA, dropout      replicated
    =======================  ==========================================================

    (That of a Transformer is Megatron's, Shoeybi et al., 2019: two sums over the
    devices in each layer.)  What an axis does not divide is replicated; the table
    says so.  Of layers that are not this library's it says nothing.

    Args:
        axis: the mesh axis, or several as one.

    Raises:
        InvalidArgumentTypeError: (a TypeError) the axis is no name.

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
            "The axis of a mesh is a name, or a tuple of names.",
            got=f"{type(axis).__name__}: {axis!r}"[:120],
            write=f'{function}(axis="data")',
        )
    return axis  # type: ignore[return-value]  # just checked


def _with_axis(rules: Rules, axis: Axis, sizes: Sizes) -> Rules:
    for name in names_in(axis):
        require_axis(name, sizes, str(rules), f"axis={axis!r}")
    return rules


@dataclass(frozen=True)
class DataParallel(Rules):
    """Every leaf replicated."""

    must_match = False

    def match(self, place: Place, sizes: Sizes, taken: Spec) -> Match | None:
        """Says that the leaf is replicated."""
        return Match(taken, (self,))

    def __str__(self) -> str:
        return "data_parallel"


@dataclass(frozen=True)
class FullySharded(Rules):
    """Every large leaf split along its largest axis."""

    axis: Axis
    min_size: int
    must_match = False

    def bound(self, sizes: Sizes) -> Rules:
        """This, if the mesh has the axis."""
        return _with_axis(self, self.axis, sizes)

    def match(self, place: Place, sizes: Sizes, taken: Spec) -> Match | None:
        """Splits one more axis of the leaf, if it has one."""
        if place.is_key:
            return Match(taken, (self,), "a random key")
        if place.size < self.min_size:
            return Match(taken, (self,), f"fewer than {self.min_size} numbers")
        entries = [*taken, *[None] * (len(place.shape) - len(taken))]
        free = [i for i in place.own_axes if entries[i] is None]
        parts = parts_of(self.axis, sizes)
        fitting = [i for i in free if place.shape[i] % parts == 0]
        if not fitting:
            return Match(taken, (self,), f"{parts} divides no axis")
        entries[max(fitting, key=lambda i: (place.shape[i], i))] = self.axis
        return Match(tuple(entries), (self,))

    def __str__(self) -> str:
        return "fully_sharded"


@dataclass(frozen=True)
class TensorParallel(Rules):
    """The layers of this library, each in its way."""

    axis: Axis

    def bound(self, sizes: Sizes) -> Rules:
        """This, if the mesh has the axis."""
        return _with_axis(self, self.axis, sizes)

    def match(self, place: Place, sizes: Sizes, taken: Spec) -> Match | None:
        """What the layout of the innermost known layer around the leaf says."""
        layout = _layout_of(place)
        if layout is None:
            return None
        parts = parts_of(self.axis, sizes)
        if layout.units is not None and layout.units % parts:
            return Match(taken, (self,), f"{parts} does not divide {layout.units} heads")
        shape = [place.shape[i] for i in place.own_axes]
        for axis in layout.axes:
            if -len(shape) <= axis < len(shape) and shape[axis] % parts == 0:
                entries = [None] * len(shape)
                entries[axis] = self.axis  # type: ignore[call-overload]
                return Match(merged(taken, on_own_axes(place, tuple(entries))), (self,))
        return Match(taken, (self,), f"{parts} does not divide it" if layout.axes else "")

    def __str__(self) -> str:
        return "tensor_parallel"


def _layout_of(place: Place) -> Layout | None:
    return next((layout for give in LAYOUTS if (layout := give(place)) is not None), None)
