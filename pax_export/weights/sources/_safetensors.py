"""safetensors files, checked by the library and memory-mapped; its numpy side copies twice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pax_export._errors import a_few
from pax_export._optional import require
from pax_export.weights import _checksums
from pax_export.weights._dtypes import NUMPY_NAMES, from_stored
from pax_export.weights._header import HeaderEntry, is_safetensors, read_header
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, Source, damage_error, unsupported_dtype_error

KIND = "safetensors file"


def matches(file: InputFile) -> bool:
    """Whether a file begins as one of this format does."""
    return is_safetensors(file.begin(9))


def read(file: InputFile) -> Source:
    """Reads the arrays of one file."""
    library = require("safetensors", "safetensors", "open_source of a safetensors file")
    begin = file.read(0, 8)
    header = read_header(begin, file.read(8, int.from_bytes(begin, "little")), file.where)
    _require_dtypes(header.arrays, file.where)
    with library.safe_open(file.path, framework="numpy"):
        pass  # shapes, offsets and sizes fit each other and the file
    entries = {
        name: _make_entry(file, name, stored, header.sums.get(name))
        for name, stored in header.arrays.items()
    }
    return Source("safetensors", file.where, entries, metadata=header.metadata)


def _require_dtypes(arrays: Mapping[str, HeaderEntry], where: str) -> None:
    """Raises one error about all arrays of unsupported dtypes."""
    unknown = {name: repr(each.code) for name, each in arrays.items()
               if each.code not in NUMPY_NAMES}  # fmt: skip
    if not unknown:
        return
    if len(unknown) == 1:
        ((name, code),) = unknown.items()
        raise unsupported_dtype_error(f"{name} in {where}", code, NUMPY_NAMES)
    listed = a_few([f"{name:.200}: {code:.50}" for name, code in unknown.items()], 20)
    raise unsupported_dtype_error(where, listed, NUMPY_NAMES)


def _make_entry(file: InputFile, name: str, stored: HeaderEntry, checksum: str | None) -> Entry:
    """An array as `save_weights` was given it, if that has left a note; keys as their data."""
    where, key = f"{name} in {file.where}", (stored.note or {}).get("key")

    def map_array() -> np.ndarray:
        return file.array(stored.dtype, stored.shape, stored.offset)

    def read_array() -> np.ndarray:
        array = map_array()
        if (
            checksum is not None
            and _checksums.checksum_of(array.reshape(-1).view(np.uint8)) != checksum
        ):
            raise damage_error(where, KIND, "its numbers differ from their checksum")
        return from_stored(array, None if key else stored.note)

    if key or stored.note is None:
        note = f"keys of {key}" if key else ""
        return Entry(where, KIND, stored.shape, stored.dtype, read_array,
                     lambda index: map_array()[index], note)  # fmt: skip
    saved = stored.description
    return Entry(where, KIND, saved.shape, saved.dtype, read_array)
