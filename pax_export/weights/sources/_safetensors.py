"""safetensors: a header of JSON, and the arrays one after the other."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedDtypeError, a_few
from pax_export.weights import _checksums
from pax_export.weights._dtypes import NUMPY_NAMES, described, restored
from pax_export.weights._leaves import RESERVED
from pax_export.weights.sources._reader import InputFile
from pax_export.weights.sources._source import Entry, Source, damaged

KIND = "safetensors file"
_LARGEST_HEADER = 100_000_000
_NOTES = "pax_export"


def matches(file: InputFile) -> bool:
    """Whether a file begins as one of this format does."""
    begin = file.begin(9)
    return begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= _LARGEST_HEADER


def read(file: InputFile) -> Source:
    """The arrays of one file."""
    entries, metadata = _read_header(file)
    return Source("safetensors", file.where, entries, metadata=metadata)


def _read_header(file: InputFile) -> tuple[dict[str, Entry], dict[str, Any]]:
    begin = file.read(0, 8)
    size = int.from_bytes(begin, "little")
    raw = file.read(8, size)
    header = json.loads(raw, object_pairs_hook=_no_name_twice)
    metadata = header.pop(RESERVED, {})
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("metadata that are not texts")
    sums = _checksums.read(begin + raw, metadata)
    if sums is None:
        raise ValueError("a header that differs from its checksum")
    notes = json.loads(metadata.get(_NOTES, "{}"))
    _require_dtypes(header, file.where)
    places = []
    entries = {}
    for name, fields in header.items():
        where = f"{name} in {file.where}"
        shape, code = fields["shape"], fields["dtype"]
        first, last = fields["data_offsets"]
        _require_whole_numbers([*shape, first, last], where)
        dtype = np.dtype(NUMPY_NAMES[code])
        if last - first != math.prod(shape) * dtype.itemsize:
            got = f"{last - first} bytes of {code}{list(shape)}"
            raise damaged(where, KIND, got)
        file.require(8 + size + first, last - first)
        places.append((first, last))
        place = (dtype, tuple(shape), 8 + size + first)
        entries[name] = _entry(file, name, code, place, notes.get(name), sums.get(name))
    _require_no_gaps(sorted(places), file.size - 8 - size)
    return entries, metadata


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} twice in the header")
    return found


def _require_whole_numbers(numbers: list[Any], where: str) -> None:
    wrong = [each for each in numbers if type(each) is not int or each < 0]
    if wrong:
        raise damaged(where, KIND, f"{wrong[0]!r} as a size or an offset")


def _require_no_gaps(places: list[tuple[int, int]], size: int) -> None:
    at = 0
    for first, last in places:
        if first != at:
            raise ValueError(f"arrays that overlap, or a gap, at byte {at} of the data")
        at = last
    if at != size:
        raise ValueError(f"arrays of {at} bytes in all, where {size} bytes follow the header")


def _require_dtypes(header: dict[str, Any], where: str) -> None:
    """One error about all arrays of a dtype that nothing here has."""
    unknown = {
        name: repr(fields["dtype"])
        for name, fields in header.items()
        if fields["dtype"] not in NUMPY_NAMES
    }
    if unknown:
        first, alone = next(iter(unknown)), len(unknown) == 1
        raise UnsupportedDtypeError(
            "Neither numpy nor jax has the dtype of this array."
            if alone
            else "Neither numpy nor jax has the dtypes of these arrays.",
            where=f"{first} in {where}" if alone else where,
            got=unknown[first]
            if alone
            else a_few([f"{name:.200}: {code:.50}" for name, code in unknown.items()], 20),
            write=f"a file of {', '.join(NUMPY_NAMES)}",
        )


def _entry(
    file: InputFile, name: str, code: str, place: Any, note: Any, checksum: str | None
) -> Entry:
    """An array, as `save_weights` was given it if that has left a note; keys as their data."""
    where, key = f"{name} in {file.where}", (note or {}).get("key")

    def read() -> np.ndarray:
        array = file.array(*place)
        if checksum is not None and _checksums.of(array.reshape(-1).view(np.uint8)) != checksum:
            raise damaged(where, KIND, "its numbers differ from their checksum")
        return restored(array, None if key else note)

    if key or note is None:
        return Entry(
            where, KIND, place[1], place[0], read, lambda index: file.array(*place)[index],
            note=f"keys of {key}" if key else "",
        )  # fmt: skip
    saved = described(code, place[1], note)
    return Entry(where, KIND, saved.shape, saved.dtype, read)
