"""Random keys as two arrays of words, and as one array."""

from __future__ import annotations

import numpy as np

from pax_export._types import DTypeLike
from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.values import Parts, Value


def words_of_keys(writer: Writer, keys: Parts) -> Value:
    """Keys as uint32 [..., 2]."""
    axis = keys.rank
    pieces = (writer.unsqueeze(each, [axis]) for each in keys.parts)
    name = writer("Concat", *pieces, axis=axis)
    return Value(name, np.dtype(np.uint32), (*keys.shape, 2))


def keys_of_words(writer: Writer, words: Value, dtype: DTypeLike) -> Parts:
    axis = words.rank - 1
    names = (writer("Gather", words, np.array(index, np.int64), axis=axis) for index in range(2))
    one, two = (Value(name, np.dtype(np.uint32), words.shape[:-1]) for name in names)
    return Parts((one, two), dtype)
