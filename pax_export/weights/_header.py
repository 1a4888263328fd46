"""The header of a safetensors file: dtype, shape and offset of each array."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._errors import WeightsFileError
from pax_export.weights import _checksums
from pax_export.weights._binary_file import BinaryFile, damage_error
from pax_export.weights._dtypes import NUMPY_NAMES, Description, Note
from pax_export.weights._leaves import RESERVED

KIND = "file of safetensors"
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
        name = NUMPY_NAMES.get(self.code, self.code)
        if self.note is None:
            return Description(self.shape, name)
        if "key" in self.note:
            return Description(self.shape[:-1], f"key<{self.note['key']}>")
        complex_numbers = self.note["dtype"] == "complex128"  # as pairs
        return Description(self.shape[:-1] if complex_numbers else self.shape, self.note["dtype"])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the bytes in the file."""
        return np.dtype(NUMPY_NAMES[self.code])


def read_header(
    file: BinaryFile,
) -> tuple[dict[str, HeaderEntry], dict[str, Any], dict[str, str]]:
    """Returns the arrays of a file, the metadata, and the checksums of the arrays.

    The checksum of the header is compared; `safetensors.safe_open` checks the rest.
    """
    begin = file.read(0, 8)
    raw, where = file.read(8, int.from_bytes(begin, "little")), file.where
    fields = json.loads(raw)
    metadata = fields.pop(RESERVED, None) or {}  # safetensors allows null
    sums = _checksums.read_checksums(begin + raw, metadata)
    if sums is None:
        raise damage_error(where, KIND, "a header that differs from its checksum")
    notes = _read_notes(metadata, where)
    arrays = {
        name: HeaderEntry(each["dtype"], tuple(each["shape"]),
                          len(begin) + len(raw) + each["data_offsets"][0], notes.get(name))
        for name, each in fields.items()
    }  # fmt: skip
    return arrays, metadata, sums


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


def is_safetensors(begin: bytes) -> bool:
    """Whether the first nine bytes of a file are those of this format."""
    return begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= LARGEST_HEADER
