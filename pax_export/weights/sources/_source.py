"""What a reader takes and returns: an open file or archive, and a source of lazy arrays."""

from __future__ import annotations

import contextlib
import math
import struct
import zipfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import IO, Any, Protocol, Self

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError, WeightsFileError, a_few
from pax_export._foundations.types import DTypeLike
from pax_export._foundations.wire import RandomAccessBytes, crc32
from pax_export.weights._binary_file import BinaryFile, damage_error, refuse_damaged

Index = tuple[slice, ...]
Read = Callable[[], np.ndarray]
ReadPart = Callable[[Index], np.ndarray]

_MOST_DIMENSIONS = 64


def check_shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of an array, before anything is computed from them."""
    if len(sizes) > _MOST_DIMENSIONS or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"the shape {sizes!r:.100}")
    return tuple(sizes)


def unsupported_dtype_error(where: str, got: object, known: Iterable[str]) -> UnsupportedDtypeError:
    """The error about an array of a dtype that neither numpy nor jax has."""
    return UnsupportedDtypeError(
        "The dtype of an array is unsupported by numpy and jax.",
        where=where,
        got=got,
        write=f"a file of {', '.join(known)}",
    )


def find_tied(keys: Mapping[str, Hashable]) -> dict[str, str]:
    """Returns, for each name whose key an earlier name has, that name."""
    first: dict[Hashable, str] = {}
    return {name: first[key] for name, key in keys.items() if first.setdefault(key, name) != name}


def several_files_error(
    where: str, what: str, names: Iterable[str], example: object
) -> WeightsFileError:
    """The error about a folder with several files that could be opened."""
    return WeightsFileError(
        f"This folder has {what}; the choice is ambiguous.",
        where=where,
        got=a_few(list(names), 8),
        write=f"the path of one, e.g. {example}",
    )


class Entry:
    """One array of a source.

    Attributes:
        shape: the shape in the file.
        dtype: the numpy dtype of `read`, possibly a small float of jax.
        note: further information, e.g. ``"Q4_1"`` of an array that is dequantized when
            it is read; or empty.

    Example:
        >>> import numpy as np
        >>> from pax_export.weights import open_source
        >>> with open_source({"kernel": np.eye(3)}) as source:
        ...     entry = source.entries["kernel"]
        ...     entry.shape, entry.dtype.name, entry.read_part((slice(1), slice(2)))
        ((3, 3), 'float64', array([[1., 0.]]))
    """

    __slots__ = ("_kind", "_part", "_read", "_where", "dtype", "note", "shape")

    def __init__(
        self,
        where: str,
        kind: str,
        shape: Iterable[int],
        dtype: DTypeLike,
        read: Read,
        part: ReadPart | None = None,
        note: str = "",
    ):
        self.shape = tuple(int(size) for size in shape)
        self.dtype = np.dtype(dtype)
        self.note = note
        self._where, self._kind = where, kind
        self._read, self._part = read, part

    @classmethod
    def stored(
        cls, file: RandomAccessBytes, where: str, kind: str, shape: Iterable[int], dtype: DTypeLike,
        offset: int, note: str = "", is_whole: Callable[[np.ndarray], bool] | None = None,
    ) -> Self:  # fmt: skip
        """The entry of a contiguous array of a file; `is_whole` compares its bytes."""
        shape, stored = tuple(shape), np.dtype(dtype)
        native = stored if stored.isnative else stored.newbyteorder("=")
        file.require(offset, math.prod(shape) * stored.itemsize)

        def part(index: Index | EllipsisType) -> np.ndarray:
            return file.array(stored, shape, offset)[index].astype(native, copy=False)

        def read() -> np.ndarray:
            array = part(...)
            if is_whole is not None and not is_whole(array.reshape(-1).view(np.uint8)):
                raise damage_error(where, kind, "its numbers differ from their checksum")
            return array

        return cls(where, kind, shape, native, read, part, note)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the array that `read` returns."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The whole array, not to be written to: it may be a view of the file itself."""
        with refuse_damaged(self._where, self._kind):
            array = self._checked(self._read())
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        return array

    def _checked(self, array: np.ndarray) -> np.ndarray:
        if array.shape != self.shape or array.dtype != self.dtype:
            got = f"{array.dtype}{list(array.shape)}, announced as {self.dtype}{list(self.shape)}"
            raise damage_error(self._where, self._kind, got)
        return array

    def read_part(self, index: Index) -> np.ndarray:
        """Reads a part of the array as a new array, without the rest if possible."""
        with refuse_damaged(self._where, self._kind):
            if self._part is None:
                return np.array(self._checked(self._read())[index])
            return np.array(self._part(index))

    @property
    def in_parts(self) -> bool:
        """Whether a part can be read without the rest; packed arrays are unpacked whole."""
        return self._part is not None

    def __repr__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{note}"


class Source:
    """Arrays by name, from a file of any framework; a context manager.

    Attributes:
        kind: the format, e.g. ``"safetensors"`` or ``"torch"``; the guide lists them.
        where: the path, or a description of the source, for messages.
        entries: the arrays by name, in the order of the file.
        metadata: other strings and numbers of the file, by name.
        tied: name -> an earlier name, for arrays that occur twice.
        origin: the framework whose conventions the format implies, as for ``origin=`` of `adopt`;
            empty if it implies none.

    Example:
        >>> import numpy as np
        >>> from pax_export.weights import open_source
        >>> with open_source({"encoder": {"kernel": np.ones((2, 3), np.float32)}}) as source:
        ...     source.kind, source.entries
        ('mapping', {'encoder.kernel': float32[2,3]})
    """

    def __init__(
        self,
        kind: str,
        where: str,
        entries: Mapping[str, Entry],
        *,
        metadata: Mapping[str, Any] | None = None,
        tied: Mapping[str, str] | None = None,
        origin: str = "",
    ):
        self.kind = kind
        self.where = where
        self.entries = dict(entries)
        self.metadata = dict(metadata or {})
        self.tied = dict(tied or {})
        self.origin = origin
        self._closing = contextlib.ExitStack()

    def closing(self, opened: contextlib.ExitStack) -> Self:
        """Closes `opened` together with this source."""
        self._closing = opened
        return self

    def close(self) -> None:
        """Closes the files; arrays that were read stay valid."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Source({self.kind!r}, {self.where!r}, {len(self.entries)} arrays)"


class InputFile(BinaryFile):
    """An untrusted file that is open while its source is; `archive` is its zip archive, or None."""

    def __init__(
        self,
        path: Path,
        where: str | None = None,
        keep_quantized: bool = False,
        resources: contextlib.ExitStack | None = None,
    ):
        super().__init__(path, where)
        self.keep_quantized = keep_quantized
        self._resources = contextlib.ExitStack() if resources is None else resources
        self._resources.callback(self.close)
        self._others: dict[Path, Self] = {}

    def open_other(self, path: Path, where: str | None = None) -> Self:
        """Another file, opened once, which is closed together with this one."""
        if path not in self._others:
            self._others[path] = type(self)(path, where, self.keep_quantized, self._resources)
        return self._others[path]

    @cached_property
    def archive(self) -> ZipArchive | None:
        """The members of a zip archive, or None."""
        if self.begin(2) != b"PK":
            return None
        with refuse_damaged(self.where, "zip archive"):
            return ZipArchive(self)


class Reader(Protocol):
    """A module that reads one format; ``HAS_SIGNATURE = False`` in it makes it one of the last."""

    @property
    def KIND(self) -> str:
        """The name of this file format in errors."""
        ...

    def matches(self, file: InputFile) -> bool:
        """Whether the content of the file, not its name, has this format."""
        ...

    def read(self, file: InputFile) -> Source:
        """The names, shapes and dtypes of the arrays; any exception becomes a WeightsFileError."""
        ...


# --- untrusted zip archives: checked for duplicates and size; stored entries are mapped


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
        begin = self.offset(name)
        if begin is not None:
            content = self._file.array(np.uint8, (self.size(name),), begin)
            if check and crc32(content, 0) != self._members[name].CRC:
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

    def offset(self, name: str) -> int | None:
        """Returns the offset of an uncompressed member, or None."""
        info = self._members[name]
        size = self.size(name)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return None
        self.open(name).close()  # zipfile compares the header there with the archive's
        header = self._file.read(info.header_offset, _LOCAL_HEADER)
        begin = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<26xHH", header))
        self._file.require(begin, size)
        return begin
