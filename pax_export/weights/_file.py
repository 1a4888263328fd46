"""Reads and writes safetensors files, by the library; arrays are mapped from the file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.errors import WeightsFileError
from pax_export._foundations.files import atomic
from pax_export._foundations.files.own_files import Belongs, Recognize
from pax_export._foundations.optional import require
from pax_export.weights import _metadata
from pax_export.weights._binary_file import BinaryFile, damage_error, refuse_damaged
from pax_export.weights._metadata import NUMPY_NAMES, RESERVED, Description, Note, from_stored


def write_weights(
    path: Path,
    arrays: dict[str, np.ndarray],
    notes: Mapping[str, Note],
    extra: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays to a file, replacing an existing one; raises WeightsFileError."""
    library = require("safetensors.numpy", "safetensors", "save_weights")
    metadata = {**(extra or {}), _metadata.ENTRY: _metadata.checksums_text(arrays)}
    if notes:
        metadata[NOTES] = json.dumps(notes)
    failed = require("safetensors", "safetensors", "save_weights").SafetensorError
    with whole_file(path, _recognize_weights, "save_weights") as temporary:
        try:
            library.save_file(arrays, temporary, metadata=metadata)
        except failed as error:
            raise WeightsFileError(
                "safetensors failed to write the weights.",
                where=str(path),
                got=error,
                write="python -m pip install --upgrade safetensors, if it does not know a dtype",
            ) from error
        _metadata.seal_header(temporary)


@contextmanager
def whole_file(path: Path, ours: Recognize, who: str) -> Iterator[Path]:
    """Yields the path of a file that becomes ``path``, or replaces one of ours, after the block.

    A link is kept, and its target replaced. Errors are about `who` writes.
    """
    try:
        target = Path(os.path.realpath(atomic.require_local(path)))
        with atomic.replace_file(target, ours) as temporary:
            yield temporary
            temporary.chmod(_file_mode(target, temporary.parent))
    except WeightsFileError:
        raise
    except OSError as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "strerror", None) or getattr(error, "got", None)
        remote = "a path of another machine" if atomic.is_remote(path) else cause
        raise WeightsFileError(
            f"{who}: the weights cannot be written to this path.",
            where=str(path).replace("\0", "\\0"),
            got=reason or ("a directory" if path.is_dir() else remote),
            write=getattr(error, "write", None)
            or "a path in a directory that you may write to, on a disk with room",
        ) from error


def _recognize_weights(path: Path) -> Belongs | None:
    with path.open("rb") as file:
        return (lambda name: False) if is_safetensors(file.read(9)) else None


def _file_mode(target: Path, new: Path) -> int:
    """The permissions of the replaced file, or those of a new file under the process's umask."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    return stat.S_IMODE(new.stat().st_mode) & 0o666


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    """Context manager that opens a weights file; each array that is read has its checksum."""
    library = require("safetensors", "safetensors", "load_weights")
    with BinaryFile(path) as file:
        try:
            with library.safe_open(path, framework="numpy"):
                pass  # it is a whole safetensors file
        except (OSError, library.SafetensorError) as error:
            raise WeightsFileError(
                "The file is not a safetensors file, or is incomplete.",
                where=str(path),
                got=f"{file.beginning_text} ({error})",
                write="a file that pax_export.save_weights or another program wrote to its end; "
                "module, report = pax_export.weights.adopt(module, path) for other formats",
            ) from error
        yield WeightsFile(file)


class WeightsFile:
    """An open weights file; `entries` maps names to contents, in the order of the file."""

    def __init__(self, file: BinaryFile):
        self._file = file
        self.entries, _, self._sums = read_header(file)

    def read(self, name: str) -> Any:
        """Makes the array with this name; a WeightsFileError if it is not as it was written."""
        entry = self.entries[name]
        array = np.empty(entry.shape, entry.dtype)
        with refuse_damaged(f"{name} in {self._file.where}", KIND):
            content = array.reshape(-1).view(np.uint8)
            self._file.fill(content, entry.offset)
            self._compare(name, content)
            return from_stored(array, entry.note)

    def read_for_comparison(self, name: str) -> None:
        """Compares the whole of an array that is wanted in parts with its checksum."""
        if name in self._sums:
            self._compare(name, self._mapped(name).reshape(-1).view(np.uint8))

    def _compare(self, name: str, content: np.ndarray) -> None:
        if name in self._sums and self._sums[name] != _metadata.checksum_of(content):
            where = f"{name} in {self._file.where}"
            raise damage_error(where, KIND, "its numbers differ from their checksum")

    def read_part(self, name: str, index: tuple[slice, ...] | None) -> np.ndarray:
        """Reads a part of an array without a note, and nothing else."""
        return np.array(self._mapped(name)[index])

    def _mapped(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        return self._file.array(entry.dtype, entry.shape, entry.offset)


# --- the header of a safetensors file: dtype, shape and offset of each array ----------


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
    sums = _metadata.read_checksums(begin + raw, metadata)
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
