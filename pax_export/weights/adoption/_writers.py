"""Writes arrays as files of safetensors, numpy or torch."""

from __future__ import annotations

import itertools
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pax_export._errors import InvalidArgumentError, UnsupportedDtypeError
from pax_export._files import npz
from pax_export._files.overwrite_guard import Belongs
from pax_export.weights._dtypes import Note, to_stored
from pax_export.weights._file import whole_file, write_weights
from pax_export.weights.adoption._groups import WRITTEN_AS
from pax_export.weights.sources import TORCH_STORAGES

Arrays = Mapping[str, np.ndarray]
_STORAGES = {dtype: name for name, dtype in TORCH_STORAGES.items()}

_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written
_ALIGNED = 64  # torch memory-maps storages that begin at multiples of this

_DICT = b"ccollections\nOrderedDict\n)R"
_BEGIN = b"\x80\x02" + _DICT + b"("  # torch's own pickles number their contents
_PICKLE = "archive/data.pkl"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def choose_writer(path: str | os.PathLike[str]) -> Callable[[Arrays, Mapping[str, Any]], None]:
    """A function that writes arrays and metadata to a path, atomically; chosen by its suffix."""
    file = Path(path)
    ending = file.suffix.lower()
    if ending == ".safetensors":
        return lambda arrays, metadata: _write_safetensors(file, arrays, metadata)
    if ending in _FORMATS:
        return lambda arrays, _: _write(file, arrays, _FORMATS[ending])
    raise InvalidArgumentError(
        "The format of the path is unsupported.",
        where="save_as",
        got=repr(os.fspath(path))[:200],
        write="a path that ends with .safetensors, .npz, .pt or .pth",
    )


def _write_safetensors(path: Path, arrays: Arrays, metadata: Mapping[str, Any]) -> None:
    kept = {
        name: metadata[name]
        for name in ("format", WRITTEN_AS)
        if isinstance(metadata.get(name), str)
    }
    stored = {name: to_stored(array) for name, array in arrays.items()}
    notes: dict[str, Note] = {name: note for name, (_, note) in stored.items() if note is not None}
    write_weights(path, {name: array for name, (array, _) in stored.items()}, notes, extra=kept)


def _write(path: Path, arrays: Arrays, form: _FileFormat) -> None:
    for name, array in arrays.items():
        if not form.knows(array.dtype):
            raise UnsupportedDtypeError(
                f"Files of {form.program} have no place for an array of this dtype.",
                where=name,
                got=array.dtype,
                write="a path that ends with .safetensors",
            )
    with whole_file(path, form.recognize, "save_as") as temporary:
        form.write(temporary, arrays)


def _write_torch(path: Path, arrays: Arrays) -> None:
    """Writes a state dict for ``torch.load(path, weights_only=True)``."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_member(archive, _PICKLE, _pickle_arrays(arrays))
        _write_member(archive, "archive/byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            little = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            _write_member(archive, f"archive/data/{number}", little.reshape(-1).view(np.uint8).data)
        _write_member(archive, "archive/version", b"3\n")


def _recognize_torch(path: Path) -> Belongs | None:
    """Recognizes an archive of `_write_torch` at a path."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_PICKLE) as file:
            return (lambda name: False) if file.read(len(_BEGIN)) == _BEGIN else None
    except (KeyError, *npz.UNREADABLE):
        return None


def _write_member(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    begin = archive.start_dir + 30 + len(name) + 20  # a header, and sizes of 64 bits
    padding = -(begin + 4) % _ALIGNED
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(content)


def _pickle_arrays(arrays: Arrays) -> bytes:
    parts = [_BEGIN]
    for number, (name, array) in enumerate(arrays.items()):
        strides = itertools.accumulate(
            array.shape[:0:-1], lambda stride, size: stride * max(size, 1), initial=1
        )
        steps = tuple(strides)[::-1][: array.ndim]
        kind = f"ctorch\n{_STORAGES[array.dtype.name]}\n".encode()
        storage = _pickle(("storage", kind, str(number), "cpu", array.size)) + b"Q"
        tensor = _pickle((storage, 0, array.shape, steps, b"\x89", _DICT))
        parts += [_pickle(name), _TENSOR, tensor, b"R"]
    return b"".join([*parts, b"u."])


def _pickle(value: object) -> bytes:
    """The opcodes that make a tuple, a text or a number; bytes are opcodes already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_pickle, value)) + b"t"
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    assert isinstance(value, int)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


class _FileFormat(NamedTuple):
    """A format without notes about dtypes."""

    program: str
    knows: Callable[[np.dtype], bool]
    recognize: Callable[[Path], Belongs | None]  # files that may be replaced
    write: Callable[[Path, Arrays], None]


_TORCH = _FileFormat("torch", lambda dtype: dtype.name in _STORAGES, _recognize_torch, _write_torch)
_NPZ = _FileFormat("numpy", lambda dtype: dtype.kind in "biufc", npz.recognize_npz, npz.write)
_FORMATS = {".npz": _NPZ, ".pt": _TORCH, ".pth": _TORCH}
