""".npz archives, without pickled objects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    ZipArchive,
    check_shape,
    damage_error,
    refuse_damaged,
)

KIND = ".npz file"
#: numpy reads no longer header.
_LARGEST_HEADER = 10_000


def matches(file: InputFile) -> bool:
    names = file.archive.names if file.archive else []
    return bool(names) and all(name.endswith(".npy") for name in names)


def read(file: InputFile) -> Source:
    entries, archive = {}, file.archive
    assert archive is not None  # `matches` has looked
    for member in archive.names:
        name = member.removesuffix(".npy")
        with refuse_damaged(f"{name} in {file.where}", KIND):
            entries[name] = _make_entry(archive, member, f"{name} in {file.where}")
    return Source("npz", file.where, entries)


def _make_entry(archive: ZipArchive, member: str, where: str) -> Entry:
    shape, fortran, dtype, begin = _read_header(archive, member)
    if dtype.kind not in "biufcV" or dtype.names is not None or dtype.subdtype is not None:
        raise UnsupportedDtypeError(
            "An array contains Python objects, which are never unpickled."
            if dtype.hasobject
            else "An array is not numeric.",
            where=where,
            got=dtype,
            write="numpy.savez of arrays of numbers or booleans",
        )
    count = math.prod(shape) * dtype.itemsize
    if begin + count != archive.size(member):
        got = f"{archive.size(member) - begin} bytes of {dtype}{list(shape)}"
        raise damage_error(where, KIND, got)

    native = dtype.newbyteorder("=")

    def read(index: Any = ..., check: bool = True) -> np.ndarray:
        content = archive.array(member, check)[begin:]
        array = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
        return array[index].astype(native, copy=False)

    note = "" if dtype.kind != "V" else "bytes of a dtype that numpy's files do not name"
    part = None if archive.offset(member) is None else lambda index: read(index, check=False)
    return Entry(where, KIND, shape, native, read, part, note)


def _read_header(archive: ZipArchive, member: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """The shape, the order, the dtype, and where the numbers begin."""
    with archive.open(member) as content:
        version = np.lib.format.read_magic(content)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"a .npy file of version {version}")
        shape, fortran, dtype = readers[version](content, max_header_size=_LARGEST_HEADER)
        return check_shape(shape), fortran, dtype, content.tell()
