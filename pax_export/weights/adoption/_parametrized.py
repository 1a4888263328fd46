"""Torch parametrizations: computes the weights, and splits them again.

=================  ==================================  =====================================
what               torch.nn.utils                      torch.nn.utils.parametrizations
=================  ==================================  =====================================
weight norm        ``weight_g``, ``weight_v``          ``parametrizations.weight.original0``,
                                                       ``.original1``
spectral norm      ``weight_orig``, ``weight_u``,      ``parametrizations.weight.original``,
                   ``weight_v``                        ``.0._u``, ``.0._v``
pruning            ``weight_orig``, ``weight_mask``
=================  ==================================  =====================================

The weight is ``g * v / |v|``, ``orig / (u' orig v)`` in eval mode, or ``orig * mask``. Other
parametrizations, such as an orthogonal matrix, compute values that no file contains, so their
arrays are refused.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from pax_export._foundations.errors import AdoptionError
from pax_export.weights.sources import Entry, Source

#: The number of elements computed at a time.
_AT_ONCE = 1 << 20
_OLD = re.compile(r"(?P<name>(?:.*[./])?\w+)_(?P<part>g|v|u|orig|mask)$")
_NEW = re.compile(
    r"(?P<above>(?:.*[./])?)parametrizations[./](?P<own>\w+)[./](?P<part>original[01]?|\d+[./].+)$"
)
_WEIGHT = re.compile(r"(?:.*[./])?\w*weight(?:_[ih]h(?:_l\d+(?:_reverse)?)?)?$")


@dataclass(frozen=True)
class Parametrized(ABC):
    """A weight that torch computes from other arrays."""

    arrays: tuple[str, ...]  # their names
    axes: tuple[int, ...] = ()
    note: ClassVar[str]
    main_index: ClassVar[int] = 0  # of the array that has the shape of the weight

    @property
    def main(self) -> str:
        """The array that has the shape of the weight."""
        return self.arrays[self.main_index]

    @classmethod
    @abstractmethod
    def of(cls, name: str, arrays: tuple[str, ...], entries: Sequence[Entry]) -> Self | None:
        """The weight of a name, or None if these are other arrays."""

    @abstractmethod
    def together(self, arrays: Sequence[np.ndarray], where: str, dtype: np.dtype) -> np.ndarray:
        """The weight that torch computes."""

    @abstractmethod
    def apart(self, weight: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Splits a weight into arrays like the ones that are there."""

    def _refusal(self, what: str, got: str | None = None, where: str = "") -> AdoptionError:
        return AdoptionError(
            what,
            where=f"{self.main} in {where}" if where else self.main,
            got=got,
            write="a file from which torch removed it, by "
            "torch.nn.utils.parametrize.remove_parametrizations, remove_spectral_norm, "
            "remove_weight_norm or prune.remove",
        )


class WeightNorm(Parametrized):
    """torch's weight norm: lengths ``g`` and directions ``v``; lengths are computed over `axes`."""

    note = "weight norm"
    main_index = 1

    @classmethod
    def of(cls, name: str, arrays: tuple[str, ...], entries: Sequence[Entry]) -> Self | None:
        length, direction = entries
        sizes = length.shape or (1,) * len(direction.shape)
        if (
            all(entry.dtype.kind in "fV" for entry in entries)
            and math.prod(direction.shape) > 0
            and len(sizes) == len(direction.shape)
            and all(one in (1, size) for one, size in zip(sizes, direction.shape))
            and (axes := tuple([axis for axis, one in enumerate(sizes) if one == 1]))
            and (_NEW.match(arrays[0]) or _WEIGHT.match(name))
        ):
            return cls(arrays, axes)
        return None

    def together(self, arrays: Sequence[np.ndarray], where: str, dtype: np.dtype) -> np.ndarray:
        # In wide numbers, a few rows at a time.
        length, direction = arrays
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
            got = f"{nowhere} directions of zeros"
            raise self._refusal("A direction of a weight norm is zero.", got, where)
        return weight

    def apart(self, weight: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Splits a weight into length and direction like torch; zeros keep their direction."""
        length, direction = arrays
        wide = weight.astype(np.float64)
        size = self._size(wide)
        direction_scaled = np.where(size == 0, direction.astype(np.float64), wide).astype(
            direction.dtype
        )
        size = np.where(size == 0, 0, self._size(direction_scaled.astype(np.float64)))
        return [size.reshape(length.shape).astype(length.dtype), direction_scaled]

    def _size(self, wide: np.ndarray) -> np.ndarray:
        return np.sqrt(np.square(wide).sum(self.axes, keepdims=True))


class SpectralNorm(Parametrized):
    """torch's spectral norm: a weight, ``u`` and ``v``; `axes` may be the rows of its matrix.

    In eval mode, the weight is divided by its largest singular value.
    """

    note = "spectral norm"

    @classmethod
    def of(cls, name: str, arrays: tuple[str, ...], entries: Sequence[Entry]) -> Self | None:
        weight, u, v = entries
        rest = math.prod(weight.shape)
        if not rest or any(each.dtype.kind not in "fV" for each in entries):
            return None
        axes = tuple(axis for axis, size in enumerate(weight.shape)
                     if (size,) == u.shape and (rest // size,) == v.shape)  # fmt: skip
        return cls(arrays, axes) if axes else None

    def together(self, arrays: Sequence[np.ndarray], where: str, dtype: np.dtype) -> np.ndarray:
        weight, u, v = (array.astype(np.float64) for array in arrays)
        found = []
        for axis in self.axes:
            matrix = np.moveaxis(weight, axis, 0).reshape(len(u), len(v))
            rows, columns = matrix @ v, u @ matrix
            # One of the two is the other times the matrix, before the last step.
            off = min(_distance_of_directions(rows, u), _distance_of_directions(columns, v))
            found.append((off, float(u @ rows)))
        first, *others = sorted(found) if weight.ndim > 2 or _is_decisive(sorted(found)) else found
        if weight.ndim > 2 and not _is_decisive([first, *others]):
            got = f"axes {' or '.join(map(str, self.axes))} for u and v that fit none of them"
            raise self._refusal("The axis of a spectral norm is ambiguous.", got, where)
        if not np.isfinite(first[1]) or first[1] == 0:
            raise self._refusal("A spectral norm is zero or not finite.", str(first[1]), where)
        return (weight / first[1]).astype(dtype)

    def apart(self, weight: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        # torch would divide a weight that was changed by its norm again.
        raise self._refusal("A changed weight does not have the norm that torch divides by.")


def _distance_of_directions(one: np.ndarray, other: np.ndarray) -> float:
    sizes = np.linalg.norm(one), np.linalg.norm(other)
    return float(np.linalg.norm(one / sizes[0] - other / sizes[1])) if all(sizes) else np.inf


def _is_decisive(found: Sequence[tuple[float, float]]) -> bool:
    """Returns whether the first axis is the only one that fits, or all norms are equal."""
    (off, norm), *others = found
    return all(
        abs(other - norm) <= 1e-6 * abs(norm) or (off < 0.5 and further > 2 * off)
        for further, other in others
    )


class Pruned(Parametrized):
    """torch's pruning: a weight and its mask of nonzero elements."""

    note = "pruned"

    @classmethod
    def of(cls, name: str, arrays: tuple[str, ...], entries: Sequence[Entry]) -> Self | None:
        weight, mask = entries
        fits = weight.shape == mask.shape and weight.dtype.kind in "fV"
        return cls(arrays) if fits else None

    def together(self, arrays: Sequence[np.ndarray], where: str, dtype: np.dtype) -> np.ndarray:
        weight, mask = arrays
        return weight.astype(dtype) * mask.astype(dtype)

    def apart(self, weight: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        before, mask = arrays
        if weight[mask == 0].any():
            got = f"{np.count_nonzero(weight[mask == 0])} numbers that are not zero"
            raise self._refusal("A pruned weight is not zero where its mask is.", got)
        return [np.where(mask == 0, before, weight).astype(before.dtype), mask]


NOTES = tuple(each.note for each in (WeightNorm, SpectralNorm, Pruned))


class Resolved(Source):
    """A source with the weights that torch computes; `computed` has the arrays it computes from."""

    def __init__(self, source: Source, computed: Mapping[str, Parametrized]):
        self.computed = dict(computed)
        names = {one.main: name for name, one in computed.items()}
        gone = {array for one in computed.values() for array in one.arrays}
        entries: dict[str, Entry] = {}
        for name, entry in source.entries.items():
            if name in names:
                entries[names[name]] = _computed_entry(source, names[name], computed[names[name]])
            elif name not in gone:
                entries[name] = entry
        tied = {name: first for name, first in source.tied.items() if {name, first} <= set(entries)}
        for name, one in computed.items():
            first = names.get(source.tied.get(one.main, ""))
            others = tuple(source.tied.get(each) for each in one.arrays)
            if first and others == computed[first].arrays:
                tied[name] = first
        super().__init__(source.kind, source.where, entries, metadata=source.metadata, tied=tied,
                         origin=source.origin)  # fmt: skip


def _computed_entry(source: Source, name: str, one: Parametrized) -> Entry:
    arrays, main = [source.entries[array] for array in one.arrays], source.entries[one.main]
    dtype = np.dtype(np.float64 if main.dtype == np.float64 else np.float32)

    def read() -> np.ndarray:
        return one.together([array.read() for array in arrays], source.where, dtype)

    return Entry(f"{name} in {source.where}", source.kind, main.shape, dtype, read, note=one.note)


def source_versions(source: Source) -> list[Source]:
    """Returns the source with computed weights, and unchanged: a module may have `g` and `v`."""
    computed = dict(_find_parametrized(source))
    return [Resolved(source, computed), source] if computed else [source]


def file_names(source: Source, name: str) -> tuple[str, ...]:
    """Returns the arrays of the file from which an array of a source is computed."""
    one = source.computed.get(name) if isinstance(source, Resolved) else None
    return one.arrays if one else (name,)


def no_weights(names: Iterable[str]) -> dict[str, str]:
    """Returns the arrays from which torch computes weights -> what they are."""
    names = list(names)
    letters: dict[str, set[str]] = {}
    for name in names:
        if name[-2:-1] == "_":
            letters.setdefault(name[:-2], set()).add(name[-1])
    found: dict[str, str] = {}
    for name, parts in _parts_of_weights(names).items():
        for part, array in parts.items():
            if part in ("original0", "original1") and len(parts) == 1:
                found[array] = _HALF.format("directions" if part == "original0" else "lengths")
            elif part in ("orig", "original", "original0", "original1"):
                if _WEIGHT.match(name) or part != "orig" or len(parts) > 1:
                    found[array] = f"torch computes {name} from it, by what the file does not say"
            # Not so weight_q, weight_k and weight_v, or the gates of a cell.
            elif part in "gv" and _WEIGHT.match(name) and letters[name] == {part}:
                found[array] = _HALF.format("directions" if part == "g" else "lengths")
    return found


_HALF = "half of a weight norm, whose {} are not there"


def _parts_of_weights(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Groups arrays that are named as parts of a weight: weight name -> part -> array."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        if found := _NEW.match(name):
            own = f"{found['above']}{found['own']}"
            parts.setdefault(own, {})[found["part"].replace("/", ".")] = name
        elif found := _OLD.match(name):
            parts.setdefault(found["name"], {})[found["part"]] = name
    return parts


def _find_parametrized(source: Source) -> Iterable[tuple[str, Parametrized]]:
    for name, parts in _parts_of_weights(source.entries).items():
        entries = {part: source.entries[array] for part, array in parts.items()}
        for needed, cls in _FORMS.items():
            if set(parts) == set(needed) and name not in source.entries:
                one = cls.of(name, tuple(parts[p] for p in needed), [entries[p] for p in needed])
                if one is not None:
                    yield name, one


_FORMS = {
    ("g", "v"): WeightNorm, ("original0", "original1"): WeightNorm,
    ("orig", "u", "v"): SpectralNorm, ("original", "0._u", "0._v"): SpectralNorm,
    ("orig", "mask"): Pruned,
}  # fmt: skip
