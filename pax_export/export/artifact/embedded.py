"""Reports embedded in single-file exports.

A ``.tflite`` file ends with a zip archive, an ``.onnx`` file with an entry of `metadata_props`; a
``.pt2`` file is an archive, which torch requires to have all entries in one folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pax_export._foundations.files import checksums
from pax_export._foundations.wire import Memory, Message, encode_varint

#: The most bytes of a report, and the most values in it: either is far beyond any model.
BYTES, VALUES = 1 << 26, 1 << 22


def parse_json(text: str) -> Any:
    """Parses JSON; a ValueError for invalid or deeply nested text.

    Example:
        >>> parse_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parse_json("[" * 100_000 + "]" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    _check_size(len(text))
    if sum(text.count(each) for each in ",[{") > VALUES:
        raise ValueError("a report has too many values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


NAME = "pax_export.json"
NAME_IN_TORCH = f"archive/extra/{NAME}"
#: Beside the report in the metadata of an ONNX model: its hash.
_HASH = b"pax_export.sha256"
_METADATA_PROPS = 14  # the number of the field in onnx.ModelProto
_LENGTH_DELIMITED = 2
#: An ONNX model has a few of these fields, and a file of others may have one in every byte.
_MOST_FIELDS = 1 << 20
#: Limit of an archive's directory, in bytes, because zipfile creates objects for all entries.
_LARGEST_LIST = 1 << 20
#: The end of an archive, without the comment that may follow it.
_END, _MARK, _LONGEST_COMMENT = struct.Struct("<4s4H2LH"), b"PK\5\6", 1 << 16
#: The marker before the directory of a huge one, and its length.
_OF_HUGE, _LENGTH_OF_HUGE = b"PK\6\7", 20
#: Others unpack into any amount of memory before the first byte is out.
_PACKED_BY = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: The errors of zipfile for files that are no archives, or of a kind that we do not write.
_OF_DAMAGED_FILES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
)


def append_zip(path: Path, text: str, name: str = NAME) -> None:
    """Puts the report into a zip archive behind the content of a file, or into that archive."""
    if not zipfile.is_zipfile(path):
        with path.open("ab") as file:
            file.write(_zip_archive(text.encode(), path.stat().st_size))
        return
    # The time in it is always the same: equal models are equal files.
    entry = zipfile.ZipInfo(name, _TIME)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry, text)


#: The first moment that an archive can have, and how it has it.
_TIME, _DOS_DATE = (1980, 1, 1, 0, 0, 0), 1 << 5 | 1
_UNIX, _VERSION, _MODE = 3, 20, 0o600 << 16


def _zip_archive(content: bytes, offset: int) -> bytes:
    """A zip archive of the report to append at `offset`, with bytes that `is_whole` can predict."""
    name, size = NAME.encode(), len(content)
    about = (0, 0, 0, _DOS_DATE, zlib.crc32(content), size, size, len(name), 0)
    head = struct.pack("<4s2B4HL2L2H", b"PK\3\4", _VERSION, 0, *about) + name
    versions = (_VERSION, _UNIX, _VERSION, 0)
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *versions, *about, 0, 0, 0, _MODE, offset)
    entry += name
    directory_offset = offset + len(head) + size
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), directory_offset, 0)
    return head + content + entry + end


def append_field(path: Path, text: str) -> None:
    """Puts the report into the metadata of an ONNX model."""
    with path.open("ab") as file:
        file.write(_metadata_entries(text.encode()))


def _metadata_entries(content: bytes) -> bytes:
    """The report as an entry of the metadata, and its hash as another."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return _encode_entry(NAME.encode(), content) + _encode_entry(_HASH, digest)


def _encode_entry(key: bytes, value: bytes) -> bytes:
    entry = b"\x0a" + encode_varint(len(key)) + key + b"\x12" + encode_varint(len(value)) + value
    tag = encode_varint(_METADATA_PROPS << 3 | _LENGTH_DELIMITED)
    return tag + encode_varint(len(entry)) + entry


def is_whole(path: Path, text: str, digest: str) -> bool:
    """Returns whether a file without its report has this hash; compares the report's bytes, too."""
    size, tail = path.stat().st_size, _tail(path, text)
    with path.open("rb") as file:
        file.seek(max(0, size - len(tail)))
        if file.read() != tail:
            return False
    return checksums.digest(path, size - len(tail)) == digest


def _tail(path: Path, text: str) -> bytes:
    """The end of a file that has this report in it."""
    content = text.encode()
    if not zipfile.is_zipfile(path):
        return _metadata_entries(content)
    return _zip_archive(content, max(0, path.stat().st_size - len(_zip_archive(content, 0))))


def remove_report(path: Path) -> str:
    """The report that was just put behind the content of a file, which then ends before it."""
    text = read(path) or ""
    os.truncate(path, path.stat().st_size - len(_tail(path, text)))
    return text


def replace(path: Path, text: str) -> None:
    append = append_zip if zipfile.is_zipfile(path) else append_field
    remove_report(path)
    append(path, text)


def read(path: Path) -> str | None:
    """Reads the report in a file; None without one."""
    try:
        return _read_report(path)
    except _OF_DAMAGED_FILES as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_report(path: Path) -> str | None:
    if zipfile.is_zipfile(path):
        _check_list(path)
        with zipfile.ZipFile(path) as archive:
            there = archive.namelist()
            name = next((each for each in (NAME, NAME_IN_TORCH) if each in there), None)
            if name is None:
                return None
            if archive.getinfo(name).compress_type not in _PACKED_BY:
                raise ValueError("it is packed in a way that pax_export does not use")
            with archive.open(name) as entry:
                text = entry.read(BYTES + 1)
                _check_size(len(text))
                return text.decode()
    found: dict[bytes, bytes] = {}
    for number, entry in _fields(_open_message(path)):
        if number != _METADATA_PROPS or not isinstance(entry, Message):
            continue
        _check_size(entry.size)
        pair = {
            field: each.content() for field, each in _fields(entry) if isinstance(each, Message)
        }
        if pair.get(1) in (NAME.encode(), _HASH):
            found[pair[1]] = pair[2]
    text = found.get(NAME.encode())
    if text is None:
        return None
    if _HASH in found and found[_HASH] != hashlib.sha256(text).hexdigest().encode():
        raise ValueError("it is not as it was written")
    return text.decode()


def _open_message(path: Path) -> Message:
    """A file as a protobuf message that is read lazily."""
    if not path.stat().st_size:
        return Message(Memory(b""))
    with path.open("rb") as file:
        return Message(Memory(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))))


def _check_list(path: Path) -> None:
    """Refuses an archive whose list of names would fill the memory."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _END.size - _LONGEST_COMMENT - _LENGTH_OF_HUGE))
        tail = file.read()
    at = len(tail) - _END.size
    if tail[at : at + 4] != _MARK:  # as zipfile looks for it
        at = tail.rfind(_MARK)
    listed = _END.unpack_from(tail, at)[5] if 0 <= at <= len(tail) - _END.size else 0
    if listed > _LARGEST_LIST or _OF_HUGE in tail[max(0, at - _LENGTH_OF_HUGE) : at]:
        raise ValueError("the archive has too many files for one of pax_export")


def _check_size(size: int) -> None:
    if size > BYTES:
        raise ValueError("the report is too large")


def _fields(message: Message) -> Iterator[tuple[int, int | Message]]:
    """Yields the fields of a protobuf message up to the first invalid one."""
    fields = itertools.islice(message.fields(), _MOST_FIELDS)
    while True:
        try:
            yield next(fields)
        except (StopIteration, ValueError, IndexError):
            return
