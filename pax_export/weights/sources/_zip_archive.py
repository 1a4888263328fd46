"""Untrusted zip archives: checked for duplicates and size; stored entries are mapped."""

from __future__ import annotations

import struct
import zipfile
from typing import IO

import numpy as np

from pax_export.weights import _checksums
from pax_export.weights._binary_file import BinaryFile

#: Limit of the compression ratio: no useful array is packed more tightly.
_MOST_UNPACKED, _MOST_TIMES = 1 << 28, 100
_LOCAL_HEADER = 30


class ZipArchive:
    """The members of a zip archive, by name and in order."""

    def __init__(self, file: BinaryFile):
        self._file = file
        self._zip = zipfile.ZipFile(file.stream())
        infos = [info for info in self._zip.infolist() if not info.is_dir()]
        self._members = {info.filename: info for info in infos}
        if len(self._members) != len(infos):
            names = [info.filename for info in infos]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the name {twice!r} twice in the archive")

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def size(self, name: str) -> int:
        """Returns the unpacked size of a member; raises for zip bombs."""
        info = self._members[name]
        times = info.file_size / max(1, info.compress_size)
        if info.file_size > _MOST_UNPACKED and times > _MOST_TIMES:
            raise ValueError(f"{name!r} expands {info.compress_size} bytes to {info.file_size}")
        if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
            raise ValueError(f"{name!r} is not packed, and has two sizes")
        return info.file_size

    def open(self, name: str) -> IO[bytes]:
        """A member as a program reads it from its begin on."""
        self.size(name)
        return self._zip.open(self._members[name])

    def read(self, name: str, most: int) -> bytes:
        """The whole of a small member."""
        if self.size(name) > most:
            raise ValueError(f"{name!r} has {self.size(name)} bytes, and may have {most}")
        return self._zip.read(name)

    def array(self, name: str, check: bool = True) -> np.ndarray:
        """The bytes of a member: a view of the file if it is not packed."""
        place = self.place(name)
        if place is not None:
            content = self._file.array(np.uint8, (self.size(name),), place)
            if check and _checksums.crc32(content, 0) != self._members[name].CRC:
                raise ValueError(f"{name!r} differs from its checksum")
            return content
        with self.open(name) as packed:
            content, at = np.empty(self.size(name), np.uint8), 0
            while piece := packed.read(1 << 20):
                content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
        if at != len(content):
            raise ValueError(f"the size of {name!r} does not match the archive")
        return content

    def place(self, name: str) -> int | None:
        """Returns the offset of an uncompressed member, or None."""
        info = self._members[name]
        size = self.size(name)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return None
        header = self._file.read(info.header_offset, _LOCAL_HEADER)
        signature, names, extra = struct.unpack("<4s22xHH", header)
        if signature != b"PK\x03\x04":
            raise ValueError(f"{name!r} does not begin at its offset")
        begin = info.header_offset + _LOCAL_HEADER + names + extra
        own = self._file.read(info.header_offset + _LOCAL_HEADER, names)
        if own != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
            raise ValueError(f"two names for {name!r}")
        self._file.require(begin, size)
        return begin
