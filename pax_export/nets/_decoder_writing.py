"""The tensors of a file of others, one after the other, of a Decoder: its loading undone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pax_export._types import PyTree
from pax_export.core import named_leaves
from pax_export.nets._decoder_names import Pieces, SourceArray

_NORMS = re.compile(r"(^|\.)(\w*_)?norm\.scale$")


class WrittenTensor(NamedTuple):
    """A tensor of a file, whose numbers are made when they are asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def file_tensors(lm: PyTree, pieces: Pieces, norm_shift: float = 0.0) -> list[WrittenTensor]:
    """The tensors of a file that these pieces are read from.

    Args:
        lm: a `Decoder`.
        pieces: where the file keeps each leaf.
        norm_shift: what is added to the scales of norms.
    """
    found: dict[str, list[tuple[SourceArray, Any, int | None, float]]] = {}
    for name, leaf in named_leaves(lm):
        shift = norm_shift if _NORMS.search(name) else 0.0
        for file_name, piece, layer in _places(name, leaf, pieces):
            found.setdefault(file_name, []).append((piece, leaf, layer, shift))
    return [_tensor(name, parts) for name, parts in sorted(found.items())]


def _places(name: str, leaf: Any, pieces: Pieces) -> Iterator[tuple[str, SourceArray, int | None]]:
    piece = pieces[re.sub(r"^layers\.\d+\.", "layers.", name)]
    listed = re.match(r"layers\.(\d+)\.", name)
    if listed:
        yield piece.name.format(listed[1]), piece, None
    elif name.startswith("layers."):
        yield from ((piece.name.format(i), piece, i) for i in range(leaf.shape[0]))
    else:
        yield piece.name, piece, None


def _tensor(name: str, parts: list[tuple[SourceArray, Any, int | None, float]]) -> WrittenTensor:
    parts = sorted(parts, key=lambda each: (each[0].part or (0, 0))[0])
    shapes = [leaf.shape if layer is None else leaf.shape[1:] for _, leaf, layer, _ in parts]
    shape = (*shapes[0][:-1], sum(each[-1] for each in shapes))
    if parts[0][0].transposed:
        shape = shape[::-1]

    def read() -> np.ndarray:
        arrays = []
        for _, leaf, layer, shift in parts:
            one = np.asarray(leaf if layer is None else leaf[layer])
            arrays.append((one + np.asarray(shift, one.dtype)) if shift else one)
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)
        piece = parts[0][0]
        if piece.transposed:
            whole = whole.T
        if piece.paired_heads:  # the pairs become neighbours
            split = whole.reshape((piece.paired_heads, 2, -1, *whole.shape[1:]))
            whole = split.swapaxes(1, 2).reshape(whole.shape)
        return np.ascontiguousarray(whole)

    return WrittenTensor(name, shape, np.dtype(parts[0][1].dtype), read)
