"""Weights that torch keeps as a direction and a length: put together, and taken apart again.

`torch.nn.utils.weight_norm` keeps ``weight_g`` and ``weight_v`` instead of ``weight``, and
`torch.nn.utils.parametrizations.weight_norm` the same as ``parametrizations.weight.original0``
and ``original1``.  The weight is ``g * v / |v|``; along which axes the length is taken is seen by
the shape of ``g``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pax_export._errors import AdoptionError
from pax_export.weights.sources import Entry, Source

NOTE = "weight norm"
#: So many numbers are computed at a time.
_AT_ONCE = 1 << 20
_OLD = re.compile(
    r"(?P<name>(?:.*[./])?\w*weight(?:_[ih]h(?:_l\d+(?:_reverse)?)?)?)_(?P<part>[gv])$"
)
_NEW = re.compile(
    r"(?P<above>(?:.*[./])?)parametrizations[./](?P<own>\w+)[./]original(?P<part>[01])$"
)


@dataclass(frozen=True)
class WeightNorm:
    """Two arrays that are one weight.

    Attributes:
        length: the name of the array of lengths, ``g``.
        direction: the name of the array of directions, ``v``.
        axes: those along which the length is taken.
    """

    length: str
    direction: str
    axes: tuple[int, ...]

    @property
    def arrays(self) -> tuple[str, str]:
        """The names of both."""
        return self.length, self.direction

    def together(
        self, length: np.ndarray, direction: np.ndarray, where: str, dtype: np.dtype
    ) -> np.ndarray:
        """The weight, computed in wide numbers a few rows at a time."""
        shape = direction.shape
        lengths = length.reshape([1 if at in self.axes else size for at, size in enumerate(shape)])
        step = len(direction) if 0 in self.axes else max(1, _AT_ONCE * shape[0] // direction.size)
        weight, nowhere = np.empty(shape, dtype), 0
        for first in range(0, len(direction), step):
            rows = slice(first, first + step)
            wide = direction[rows].astype(np.float64)
            size = self._size(wide)
            nowhere += np.count_nonzero(size == 0)
            with np.errstate(divide="ignore", invalid="ignore"):  # refused below
                weight[rows] = wide * (lengths[rows].astype(np.float64) / size)
        if nowhere:
            raise AdoptionError(
                "A direction of a weight norm has no length, so nothing says where it points.",
                where=f"{self.direction} in {where}",
                got=f"{nowhere} directions of zeros",
                write="a file whose weight norms were removed where it was written "
                "(torch.nn.utils.remove_weight_norm)",
            )
        return weight

    def apart(
        self, weight: np.ndarray, length: np.ndarray, direction: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Length and direction of a weight, of the shapes and dtypes of these.

        As torch does it the weight itself is the direction; only where it is zero, it keeps the
        one that it had.
        """
        wide = weight.astype(np.float64)
        size = self._size(wide)
        kept = np.where(size == 0, direction.astype(np.float64), wide).astype(direction.dtype)
        size = np.where(size == 0, 0, self._size(kept.astype(np.float64)))
        return size.reshape(length.shape).astype(length.dtype), kept

    def _size(self, wide: np.ndarray) -> np.ndarray:
        return np.sqrt(np.square(wide).sum(self.axes, keepdims=True))


class Resolved(Source):
    """A source in which weights stand for their lengths and directions.

    Attributes:
        norms: by the name of a weight, what it is made of.
    """

    def __init__(self, source: Source, norms: Mapping[str, WeightNorm]):
        self.norms = dict(norms)
        made = {norm.direction: name for name, norm in norms.items()}
        gone = {norm.length for norm in norms.values()}
        entries: dict[str, Entry] = {}
        for name, entry in source.entries.items():
            if name in made:
                entries[made[name]] = _entry(source, made[name], norms[made[name]])
            elif name not in gone:
                entries[name] = entry
        tied = {name: first for name, first in source.tied.items() if {name, first} <= set(entries)}
        for name, norm in norms.items():
            first = made.get(source.tied.get(norm.direction, ""))
            if first and source.tied.get(norm.length) == norms[first].length:
                tied[name] = first
        super().__init__(source.kind, source.where, entries, metadata=source.metadata, tied=tied)


def _entry(source: Source, name: str, norm: WeightNorm) -> Entry:
    length, direction = source.entries[norm.length], source.entries[norm.direction]
    dtype = np.dtype(np.float64 if direction.dtype == np.float64 else np.float32)

    def read() -> np.ndarray:
        return norm.together(length.read(), direction.read(), source.where, dtype)

    return Entry(f"{name} in {source.where}", source.kind, direction.shape, dtype, read, note=NOTE)


def versions(source: Source) -> list[Source]:
    """The source with its weight norms resolved, and as it is: a module may have `g` and `v`."""
    norms = dict(_norms(source))
    return [Resolved(source, norms), source] if norms else [source]


def file_names(source: Source, name: str) -> tuple[str, ...]:
    """The arrays of the file that an array of a source is made of."""
    norm = source.norms.get(name) if isinstance(source, Resolved) else None
    return norm.arrays if norm else (name,)


def halves(source: Source) -> dict[str, str]:
    """The arrays that are called a length or a direction alone -> what the other is."""
    letters: dict[str, set[str]] = {}
    for name in source.entries:
        if name[-2:-1] == "_":
            letters.setdefault(name[:-2], set()).add(name[-1])
    return {
        name: "lengths" if part == "v" else "directions"
        for both in _parts(source).values() if len(both) == 1
        for part, name in both.items()
        # Not so weight_q, weight_k and weight_v, or the gates of a cell.
        if name[-2] != "_" or letters[name[:-2]] == {part}
    }  # fmt: skip


def _parts(source: Source) -> dict[str, dict[str, str]]:
    parts: dict[str, dict[str, str]] = {}
    for name in source.entries:
        if found := _OLD.match(name):
            parts.setdefault(found["name"], {})[found["part"]] = name
        elif found := _NEW.match(name):
            part = "gv"[int(found["part"])]
            parts.setdefault(f"{found['above']}{found['own']}", {})[part] = name
    return parts


def _norms(source: Source) -> dict[str, WeightNorm]:
    norms: dict[str, WeightNorm] = {}
    for name, both in _parts(source).items():
        if set(both) == {"g", "v"} and name not in source.entries:
            axes = _axes(source.entries[both["g"]], source.entries[both["v"]])
            if axes is not None:
                norms[name] = WeightNorm(both["g"], both["v"], axes)
    return norms


def _axes(length: Entry, direction: Entry) -> tuple[int, ...] | None:
    """The axes along which the length is taken; None if these are no length and direction."""
    floating = length.dtype.kind in "fV" and direction.dtype.kind in "fV"
    if not floating or not direction.shape or math.prod(direction.shape) == 0:
        return None
    sizes = length.shape or (1,) * len(direction.shape)
    if len(sizes) != len(direction.shape):
        return None
    if any(one not in (1, size) for one, size in zip(sizes, direction.shape)):
        return None
    axes = tuple([axis for axis, one in enumerate(sizes) if one == 1])
    return axes or None
