"""Bounds-checked reads of an untrusted file; large arrays are views with mappings of their own."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from pax_export._foundations.errors import MissingWeightsFileError, PaxError, WeightsFileError
from pax_export._foundations.files import system
from pax_export._foundations.files.own_files import some_names
from pax_export._foundations.files.system import file_kind
from pax_export._foundations.types import DTypeLike
from pax_export._foundations.wire import RandomAccessBytes

#: A smaller array is read, not mapped: a process may have about 65,000 mappings.
_MAPPED = 1 << 20


@contextlib.contextmanager
def refuse_damaged(where: str, kind: str) -> Iterator[None]:
    """Converts any exception about a damaged or hostile file to a WeightsFileError."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of any reader's library; a mistake of ours would be called damage
        raise damage_error(where, kind, f"{type(error).__name__}: {error}"[:300]) from error


def damage_error(where: str, kind: str, got: object) -> WeightsFileError:
    """The error about an inconsistent or truncated file."""
    return WeightsFileError(
        f"This {kind} is corrupted or incomplete.",
        where=where,
        got=got,
        write="a whole copy of the file, as the program that made it wrote it",
    )


class BinaryFile(RandomAccessBytes):
    """A regular file, open for reading at any place; `where` names it in messages."""

    def __init__(self, path: Path, where: str | None = None):
        self.path = path
        self.where = where or str(path)
        self._number = _open_regular(path)
        self.size = os.fstat(self._number).st_size

    @property
    def beginning_text(self) -> str:
        """What the file is, for messages."""
        return f"a file of {self.size} bytes that begins with {self.begin(16)!r}"

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from an offset on; an error if the file ends before."""
        return self.in_memory(offset, count).tobytes()

    def in_memory(self, offset: int, count: int) -> np.ndarray:
        """The same as an array, which is in memory once."""
        self.require(offset, count)
        content = np.empty(count, np.uint8)
        self.fill(content, offset)
        return content

    def fill(self, content: np.ndarray, offset: int) -> None:
        """Fills a byte array from the file; raises EOFError at the end of the file."""
        at = 0
        while at < len(content):
            done = system.read_at(self._number, content[at:].data, offset + at)
            if not done:
                raise EOFError("the file became shorter while it was read")
            at += done

    def begin(self, count: int) -> bytes:
        """Returns the first bytes, or fewer if the file is shorter."""
        return self.read(0, min(count, self.size))

    def array(self, dtype: DTypeLike, shape: Iterable[int], offset: int) -> np.ndarray:
        """Returns the array at an offset, in C order; a view of the file if it is large."""
        dtype, shape = np.dtype(dtype), tuple(shape)
        count = math.prod(shape) * dtype.itemsize
        self.require(offset, count)
        if count < _MAPPED or offset % dtype.itemsize:
            return self.in_memory(offset, count).view(dtype).reshape(shape)
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._number, offset - begin + count, access=mmap.ACCESS_READ, offset=begin
        )
        return np.frombuffer(mapped, dtype, math.prod(shape), offset - begin).reshape(shape)

    def stream(self, begin: int = 0, size: int | None = None) -> FileStream:
        """The bytes, or a part of them, to be read one after the other."""
        return FileStream(self, begin, self.size - begin if size is None else size)

    def close(self) -> None:
        """Closes the file; mapped arrays stay valid."""
        if self._number >= 0:
            os.close(self._number)
            self._number = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileStream(io.BufferedReader):
    """A file as a program reads it from the begin to the end, a piece at a time."""

    def __init__(self, file: BinaryFile, begin: int, size: int):
        super().__init__(_RawFile(file, begin, size), 1 << 16)
        self._file, self._begin = file, begin

    def take(self, count: int) -> bytes:
        """Exactly as many bytes; a false length in the file allocates no memory."""
        self._file.require(self._begin + self.tell(), count)
        return self.read(count)

    def unpack(self, kind: str) -> tuple[Any, ...]:
        """The next numbers, of a kind of `struct`."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))


class _RawFile(io.RawIOBase):
    def __init__(self, file: BinaryFile, begin: int, size: int):
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.fill(np.frombuffer(buffer, np.uint8)[:count], self._begin + self._at)
        self._at += count
        return count


def _open_regular(path: Path) -> int:
    """The number of an open regular file, or a WeightsFileError."""
    where = str(path).replace("\0", "\\0")
    try:
        number = system.open_to_read(path)
    except (OSError, ValueError) as error:
        gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise (MissingWeightsFileError if gone else WeightsFileError)(
            "The file of weights does not exist, or cannot be read.",
            where=where,
            got=getattr(error, "strerror", None) or "a path with a null character",
            write="the path of a file of weights that you may read, or of a folder that holds them",
        ) from error
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        folder = stat.S_ISDIR(mode)
        raise WeightsFileError(
            "Expected a file of weights, got a directory."
            if folder
            else "Cannot read a file that is not regular.",
            where=where,
            got=f"a directory with {some_names(path)}" if folder else file_kind(mode),
            write="the path of a file; pax_export.weights.adopt(module, path) also reads folders",
        )
    return number
