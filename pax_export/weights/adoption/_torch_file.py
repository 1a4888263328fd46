"""Writes a state dict as torch does: a zip archive with a pickle and raw arrays.

The pickle names three things, which torch looks up when it reads the file: `OrderedDict`, the
function that makes a tensor, and the kinds of storage.  It is written here opcode by opcode, so no
torch is needed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._files.npz import UNREADABLE
from pax_export._files.overwrite_guard import Belongs
from pax_export.weights._file import whole_file
from pax_export.weights.adoption._storable import require_dtypes

_STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip

_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written
_ALIGNED = 64  # torch maps storages into memory where they begin there

_DICT = b"ccollections\nOrderedDict\n)R"
_BEGIN = b"\x80\x02" + _DICT + b"("  # torch's own pickles number what they hold
_PICKLE = "archive/data.pkl"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def write_torch(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes a state dict that ``torch.load(path, weights_only=True)`` reads, or nothing."""
    require_dtypes(
        arrays,
        lambda dtype: dtype.name in _STORAGES,
        "torch has no storage for an array of this dtype.",
    )
    with (
        whole_file(path, _recognized) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        _put(archive, _PICKLE, _pickled(arrays))
        _put(archive, "archive/byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            little = np.ascontiguousarray(array)
            if little.dtype.byteorder == ">":
                little = little.astype(little.dtype.newbyteorder("<"))
            _put(archive, f"archive/data/{number}", little.reshape(-1).view(np.uint8).data)
        _put(archive, "archive/version", b"3\n")


def _recognized(path: Path) -> Belongs | None:
    """Of what lies at a path: an archive that `write_torch` made, or an empty file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_PICKLE) as file:
            ours = file.read(len(_BEGIN)) == _BEGIN
    except (KeyError, *UNREADABLE):
        ours = path.stat().st_size == 0
    return (lambda name: False) if ours else None


def _put(archive: zipfile.ZipFile, name: str, content: Any) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    begin = archive.start_dir + 30 + len(name) + 20  # a header, and sizes of 64 bits
    padding = -(begin + 4) % _ALIGNED
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(content)


def _pickled(arrays: Mapping[str, np.ndarray]) -> bytes:
    parts = [_BEGIN]
    for number, (name, array) in enumerate(arrays.items()):
        parts += [_text(name), _tensor(str(number), array)]
    return b"".join([*parts, b"u."])


def _tensor(key: str, array: np.ndarray) -> bytes:
    storage = f"ctorch\n{_STORAGES[array.dtype.name]}\n".encode()
    whole = _tuple([_text("storage"), storage, _text(key), _text("cpu"), _number(array.size)])
    strides = [1]
    for size in reversed(array.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    shape = _tuple(map(_number, array.shape))
    steps = _tuple(map(_number, strides if array.ndim else ()))
    given = _tuple([whole + b"Q", _number(0), shape, steps, b"\x89", _DICT])
    return _TENSOR + given + b"R"


def _tuple(parts: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes(9, "little").rstrip(b"\0")
    raw += b"\0" if raw[-1] & 0x80 else b""
    return b"\x8a" + bytes([len(raw)]) + raw
