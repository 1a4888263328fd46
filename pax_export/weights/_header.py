"""The header of a safetensors file: dtype, shape and offset of each array."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export.weights import _checksums
from pax_export.weights._dtypes import NUMPY_NAMES, Description, Note, describe_stored
from pax_export.weights._leaves import RESERVED

#: The entry of the metadata that holds the notes, as JSON: name -> note.
NOTES = "pax_export"
#: safetensors reads no longer header.
LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class HeaderEntry:
    """Offset, shape and dtype of one array of a file; `code` is the dtype in the file."""

    code: str
    shape: tuple[int, ...]
    offset: int
    note: Note | None

    @property
    def description(self) -> Description:
        """The array that was saved; the note has its dtype and kind."""
        return describe_stored(self.code, self.shape, self.note)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the bytes in the file."""
        return np.dtype(NUMPY_NAMES[self.code])


@dataclass(frozen=True)
class Header:
    """A header: arrays, metadata and checksums, the first and the last by the name of an array."""

    arrays: dict[str, HeaderEntry]
    metadata: dict[str, Any]
    sums: dict[str, str]


def read_header(begin: bytes, raw: bytes, where: str) -> Header:
    """Parses a header and compares its checksum; `safetensors.safe_open` checks the rest."""
    fields = json.loads(raw)
    metadata = fields.pop(RESERVED, {})
    sums = _checksums.read_checksums(begin + raw, metadata)
    if sums is None:
        raise corruption_error(where, "a header that differs from its checksum")
    notes = _read_notes(metadata, where)
    arrays = {
        name: HeaderEntry(each["dtype"], tuple(each["shape"]),
                          len(begin) + len(raw) + each["data_offsets"][0], notes.get(name))
        for name, each in fields.items()
    }  # fmt: skip
    return Header(arrays, metadata, sums)


def _read_notes(metadata: dict[str, str], where: str) -> dict[str, Note]:
    try:
        notes = json.loads(metadata.get(NOTES, "{}"))
        if all(note.keys() in ({"key"}, {"dtype"}) for note in notes.values()):
            return notes
    except (ValueError, AttributeError, RecursionError):
        pass
    raise WeightsFileError(
        f"The metadata {NOTES!r} of this file were not written by pax_export.",
        where=where,
        got=metadata[NOTES][:200],
        write="a file that pax_export.save_weights wrote, or one without this entry",
    )


def corruption_error(where: str, got: str) -> WeightsFileError:
    """The error about a file that differs from its checksums or notes."""
    return WeightsFileError(
        "The file of weights is corrupted: a checksum does not match.",
        where=where,
        got=got,
        write="a copy of the file as pax_export.save_weights wrote it",
    )


def is_safetensors(begin: bytes) -> bool:
    """Whether the first nine bytes of a file are those of this format."""
    return begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= LARGEST_HEADER
