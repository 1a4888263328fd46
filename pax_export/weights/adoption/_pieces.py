"""Conversions from arrays of a file to leaves, and back: a `Piece` has invertible steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]
#: ("reshape", shape), ("transpose", axes), ("flip", axes), ("negate", None), ("add", number)
Step = tuple[str, Any]


@dataclass(frozen=True)
class Piece:
    """A slice of a source array, and the slice of a leaf that it becomes."""

    source: str  # name of the array
    shape: Shape  # shape of the array
    split: Shape | None = None  # shape of the view that `take` indexes; usually `shape`
    take: Index | None = None  # index into the view; None for the whole array
    steps: tuple[Step, ...] = ()  # reshapes, transposes, ... of the slice
    put: Index | None = None  # index into the leaf; None for the whole leaf
    adds: bool = False  # whether it is added to the slice, instead of replacing it
    says: str = ""  # text for the report
    room: Shape | None = None  # shape of the leaf's view that `put` indexes

    def then(self, *steps: Step, says: str = "") -> Piece:
        """The same with more steps."""
        text = ", ".join(part for part in (self.says, says) if part)
        return replace(self, steps=self.steps + steps, says=text)

    @property
    def part_shape(self) -> Shape:
        """The shape of the part that is taken."""
        shape = self.split or self.shape
        return shape if self.take is None else shape_of(shape, self.take)

    def key(self) -> tuple:
        """A key that is equal for pieces with equal effects, whatever their names."""
        steps = _canonical_steps(self.part_shape, self.steps)
        return (self.source, self.split, str(self.take), steps, str(self.put), self.room, self.adds)

    def stacked(self, sizes: Shape) -> Piece:
        """Returns the piece for an array of stacked layers, from the piece for one layer."""
        every = (slice(None),) * len(sizes)
        return replace(
            self,
            shape=(*sizes, *self.shape),
            split=None if self.split is None else (*sizes, *self.split),
            take=None if self.take is None else (*every, *self.take),
            steps=tuple([(kind, _KINDS[kind].stack(value, sizes)) for kind, value in self.steps]),
            put=None if self.put is None else (*every, *self.put),
            room=None if self.room is None else (*sizes, *self.room),
        )

    def into(self, part: LeafPart) -> Piece:
        """The same for a part of a leaf instead of a whole one."""
        put = part.index
        if self.put is not None:  # a part of the part, for one of several layers
            put = (*put[: len(part.room) - len(self.put)], *self.put)
        region = shape_of(part.room, put)
        piece = self.then(*part.steps, says=part.says)
        if region == part.room:  # the whole array, for one layer that is a stack
            return piece if piece.after == region else piece.then(("reshape", region))
        if piece.after != region:
            piece = piece.then(("reshape", region))
        return replace(piece, put=put, room=part.room)

    @property
    def after(self) -> Shape:
        """The shape that it has when all is done."""
        return shape_after(self.part_shape, self.steps)


#: Leaf path -> the pieces that fill it.
Recipe = dict[str, tuple[Piece, ...]]


def recipe_key(recipe: Recipe) -> tuple:
    """A key that is equal for recipes with equal results."""
    return tuple((path, pieces_key(pieces)) for path, pieces in sorted(recipe.items()))


def pieces_key(pieces: Iterable[Piece]) -> tuple:
    """A key that is equal for pieces with equal results."""
    return tuple(sorted([piece.key() for piece in pieces], key=str))


def join_recipes(recipes: Iterable[Recipe]) -> Recipe:
    """Merges recipes into one; pieces of one leaf are concatenated."""
    found: Recipe = {}
    for recipe in recipes:
        for path, pieces in recipe.items():
            found[path] = (*found[path], *pieces) if path in found else pieces
    return found


@dataclass(frozen=True)
class LeafPart:
    """A slice of a leaf that is filled like a leaf."""

    room: Shape  # shape of the leaf's view that `index` indexes
    index: Index
    steps: tuple[Step, ...] = ()  # applied to the slice before it is stored
    says: str = ""  # text for the report


def shape_of(shape: Shape, index: Index) -> Shape:
    """Returns the shape of an array indexed by slices."""
    sizes = [len(range(*one.indices(size))) for one, size in zip(index, shape)]
    return (*sizes, *shape[len(sizes) :])


class _Kind(NamedTuple):
    """A kind of step: how it transforms an array, and its inverse."""

    apply: Callable[[np.ndarray, Any], np.ndarray]
    undo: Callable[[np.ndarray, Any, Shape], np.ndarray]  # the shape is that before the step
    stack: Callable[[Any, Shape], Any] = lambda argument, sizes: argument  # for several layers


_KINDS = {
    "reshape": _Kind(
        lambda array, shape: array.reshape(shape),
        lambda array, _, before: array.reshape(before),
        lambda shape, sizes: (*sizes, *shape),
    ),
    "transpose": _Kind(
        lambda array, axes: array.transpose(axes),
        lambda array, axes, _: array.transpose(np.argsort(axes)),
        lambda axes, sizes: (*range(len(sizes)), *[axis + len(sizes) for axis in axes]),
    ),
    "flip": _Kind(
        np.flip,
        lambda array, axes, _: np.flip(array, axes),
        lambda axes, sizes: tuple([axis + len(sizes) for axis in axes]),
    ),
    "negate": _Kind(lambda array, _: -array, lambda array, *_: -array),
    "add": _Kind(
        lambda array, number: array + np.asarray(number, array.dtype),
        lambda array, number, _: array - np.asarray(number, array.dtype),
    ),
}


def _canonical_steps(shape: Shape, steps: Sequence[Step]) -> tuple:
    """Drops steps that move no element: transposed axes of size one, empty flips."""
    found: list[tuple] = []
    for kind, value in steps:
        after = shape_after(shape, ((kind, value),))
        if kind == "transpose":
            moved = [axis for axis in value if shape[axis] != 1]
            if moved != sorted(moved):
                found.append(
                    ("transpose", squeeze_shape(shape), tuple(np.argsort(np.argsort(moved))))
                )
        elif kind == "flip":
            axes = [axis for axis in value if shape[axis] != 1]
            if axes:
                real_axes = [axis for axis in range(len(shape)) if shape[axis] != 1]
                found.append(("flip", tuple(real_axes.index(axis) for axis in axes)))
        elif kind == "reshape":
            if squeeze_shape(shape) != squeeze_shape(after):
                found.append(("reshape", squeeze_shape(shape), squeeze_shape(after)))
        else:
            found.append((kind, value))
        shape = after
    return tuple(found)


def squeeze_shape(shape: Shape) -> Shape:
    """The shape without axes of size one."""
    return tuple(size for size in shape if size != 1)


def shape_after(shape: Shape, steps: Sequence[Step]) -> Shape:
    """The shape that an array has after these steps."""
    for kind, value in steps:
        if kind == "reshape":
            shape = value
        elif kind == "transpose":
            shape = tuple(shape[axis] for axis in value)
    return shape


def apply_piece(array: np.ndarray, piece: Piece) -> np.ndarray:
    """The part of a leaf that an array becomes."""
    if piece.split is not None:
        array = array.reshape(piece.split)
    if piece.take is not None:
        array = array[piece.take]
    for kind, value in piece.steps:
        array = _KINDS[kind].apply(array, value)
    return array


def undo_piece(value: np.ndarray, piece: Piece, into: np.ndarray) -> None:
    """Writes the piece's part of a leaf back into the array of the source."""
    if piece.put is not None:
        value = leaf_region(value, piece)
    shapes = [piece.part_shape]
    for step in piece.steps:
        shapes.append(shape_after(shapes[-1], (step,)))
    for (kind, argument), shape in zip(reversed(piece.steps), reversed(shapes[:-1])):
        value = _KINDS[kind].undo(value, argument, shape)
    part = into if piece.split is None else into.reshape(piece.split)
    part[piece.take or ...] = value


def leaf_region(leaf: np.ndarray, piece: Piece) -> np.ndarray:
    """The part of a leaf that a piece fills, as a view."""
    room = leaf if piece.room is None else leaf.reshape(piece.room)
    return room[piece.put or ...]


def axes_alone(piece: Piece, shape: Shape) -> tuple[int, ...] | None:
    """Returns the axis permutation of a piece that does nothing else, or None."""
    if piece.split is not None or piece.take is not None or piece.adds:
        return None
    if piece.room not in (None, shape):
        return None
    order, now = tuple(range(len(piece.shape))), piece.shape
    for kind, value in piece.steps:
        if kind == "transpose" and len(value) == len(order):
            order = tuple([order[axis] for axis in value])
        elif kind != "reshape" or value != (1,) * (len(value) - len(now)) + now:
            return None
        now = shape_after(now, ((kind, value),))
    region = shape if piece.put is None else shape_of(shape, piece.put)
    front = len(region) - len(order)
    return order if front >= 0 and region[:front] == (1,) * front else None
