"""A source of weights: entries with names, shapes and lazy arrays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from pax_export._errors import PaxError, UnsupportedDtypeError, WeightsFileError, a_few
from pax_export._types import DTypeLike
from pax_export._wire import RandomAccessBytes
from pax_export.weights._dtypes import NUMPY_NAMES  # registers jax's dtypes with numpy

Index = tuple[slice, ...]
Read = Callable[[], np.ndarray]
ReadPart = Callable[[Index], np.ndarray]

assert NUMPY_NAMES["BF16"] == "bfloat16"


@contextlib.contextmanager
def refuse_damaged(where: str, kind: str) -> Iterator[None]:
    """Converts any exception about a damaged or hostile file to a WeightsFileError."""
    try:
        yield
    except PaxError:
        raise
    except Exception as error:
        raise damage_error(where, kind, f"{type(error).__name__}: {error}"[:300]) from error


def damage_error(where: str, kind: str, got: object) -> WeightsFileError:
    """The error about an inconsistent or truncated file."""
    return WeightsFileError(
        f"This {kind} is corrupted or incomplete.",
        where=where,
        got=got,
        write="a whole copy of the file, as the program that made it wrote it",
    )


def unsupported_dtype_error(where: str, got: object, known: Iterable[str]) -> UnsupportedDtypeError:
    """The error about an array of a dtype that neither numpy nor jax has."""
    return UnsupportedDtypeError(
        "The dtype of an array is unsupported by numpy and jax.",
        where=where,
        got=got,
        write=f"a file of {', '.join(known)}",
    )


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
        dtype: Any,
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
        offset: int, note: str = "",
    ) -> Self:  # fmt: skip
        """Returns the entry of a contiguous array at an offset of a file."""
        shape, stored = tuple(shape), np.dtype(dtype)
        native = stored if stored.isnative else stored.newbyteorder("=")
        file.require(offset, math.prod(shape) * stored.itemsize)

        def read() -> np.ndarray:
            return file.array(stored, shape, offset)

        return cls(
            where, kind, shape, native, lambda: read().astype(native, copy=False),
            lambda index: read()[index].astype(native, copy=False), note,
        )  # fmt: skip

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
    ):
        self.kind = kind
        self.where = where
        self.entries = dict(entries)
        self.metadata = dict(metadata or {})
        self.tied = dict(tied or {})
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
