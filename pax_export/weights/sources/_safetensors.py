"""safetensors files, checked by the library and memory-mapped; its numpy side copies twice."""

from __future__ import annotations

from pax_export._foundations.errors import a_few
from pax_export._foundations.optional import require
from pax_export.weights import _metadata
from pax_export.weights._file import KIND, HeaderEntry, is_safetensors, read_header
from pax_export.weights._metadata import NUMPY_NAMES, from_stored
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    unsupported_dtype_error,
)


def matches(file: InputFile) -> bool:
    return is_safetensors(file.begin(9))


def read(file: InputFile) -> Source:
    library = require("safetensors", "safetensors", "open_source of a safetensors file")
    arrays, metadata, sums = read_header(file)
    codes = [f"{n}: {each.code!r}" for n, each in arrays.items() if each.code not in NUMPY_NAMES]
    if codes:
        raise unsupported_dtype_error(file.where, a_few(codes, 20), NUMPY_NAMES)
    with library.safe_open(file.path, framework="numpy"):
        pass  # shapes, offsets and sizes fit each other and the file
    entries = {
        name: _make_entry(file, name, stored, sums.get(name)) for name, stored in arrays.items()
    }
    # safetensors.torch.save_model keeps one name of a tied array, and notes the others.
    tied = {name: first for name, first in metadata.items() if name not in arrays}
    tied = {name: first for name, first in tied.items() if first in arrays}
    entries |= {name: entries[first] for name, first in tied.items()}
    return Source("safetensors", file.where, entries, metadata=metadata, tied=tied)


def _make_entry(file: InputFile, name: str, stored: HeaderEntry, checksum: str | None) -> Entry:
    """An array as `save_weights` was given it, if that has left a note; keys as their data."""
    where, key = f"{name} in {file.where}", (stored.note or {}).get("key")
    entry = Entry.stored(
        file, where, KIND, stored.shape, stored.dtype, stored.offset,
        f"keys of {key}" if key else "",
        None if checksum is None else lambda content: _metadata.checksum_of(content) == checksum,
    )  # fmt: skip
    if key or stored.note is None:
        return entry
    saved = stored.description
    return Entry(where, KIND, saved.shape, saved.dtype,
                 lambda: from_stored(entry.read(), stored.note))  # fmt: skip
