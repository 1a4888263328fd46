"""The report inside of an export that is one file, so that it travels with it.

A ``.tflite`` file may end with a zip archive: its readers stop before, and
``unzip`` finds the report.  An ``.onnx`` file is a protobuf message: further
fields may be appended, and `metadata_props` is the one for such things.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from io import BytesIO
from pathlib import Path
from typing import IO

NAME = "pax_export.json"
_METADATA_PROPS = 14  # the number of the field in onnx.ModelProto
_LENGTH_DELIMITED = 2
#: A report is longer if somebody wants to fill our memory.
_LARGEST = 1 << 28
#: What zipfile says of archives that are none, or of a kind that we do not write.
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
_FIXED = {1: 8, 5: 4}  # bytes of the wire types that have a fixed size


def append_zip(path: Path, text: str) -> None:
    """Puts the report into a zip archive behind the content of a file."""
    # The time in it is always the same: equal models are equal files.
    entry = zipfile.ZipInfo(NAME, (1980, 1, 1, 0, 0, 0))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry, text)


def append_field(path: Path, text: str) -> None:
    """Puts the report into the metadata of an ONNX model."""
    key, value = NAME.encode(), text.encode()
    entry = b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value
    tag = _varint(_METADATA_PROPS << 3 | _LENGTH_DELIMITED)
    with path.open("ab") as file:
        file.write(tag + _varint(len(entry)) + entry)


def read(path: Path) -> str | None:
    """The report in a file; None if there is none."""
    try:
        return _read(path)
    except _OF_DAMAGED_FILES as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(path: Path) -> str | None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if NAME not in archive.namelist():
                return None
            with archive.open(NAME) as entry:
                text = entry.read(_LARGEST + 1)
                if len(text) > _LARGEST:
                    raise ValueError("a report of such a size is none")
                return text.decode()
    with path.open("rb") as file:
        for _, content in _fields(file, (_METADATA_PROPS,)):
            pair = dict(_fields(BytesIO(content), (1, 2)))
            if pair.get(1) == NAME.encode():
                return pair[2].decode()
    return None


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _read_varint(file: IO[bytes]) -> int | None:
    number = shift = 0
    while byte := file.read(1):
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return number
        shift += 7
        if shift > 63:
            return None
    return None


def _fields(file: IO[bytes], wanted: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """The outermost fields of a protobuf message that have these numbers and a length."""
    end = file.seek(0, 2)
    file.seek(0)
    while (tag := _read_varint(file)) is not None:
        field, kind = tag >> 3, tag & 7
        if kind == _LENGTH_DELIMITED:
            length = _read_varint(file)
            if length is None or file.tell() + length > end:
                return
            if field in wanted:
                yield field, file.read(length)
            else:
                file.seek(length, 1)
        elif kind == 0:
            _read_varint(file)
        elif kind in _FIXED:
            file.seek(_FIXED[kind], 1)
        else:
            return  # not a message
