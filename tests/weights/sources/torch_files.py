"""Files as PyTorch writes them, without it: a small writer of pickles, and the two formats."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage",
    "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
}  # fmt: skip


@dataclass(frozen=True)
class Name:
    full: str


@dataclass(frozen=True)
class Call:
    name: str
    arguments: tuple


@dataclass(frozen=True)
class Made:
    """An object of a class, with a state."""

    name: str
    state: Any


@dataclass(frozen=True)
class Persistent:
    identity: tuple


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + _steps(value) + b"."


def _steps(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            raw = value.to_bytes(9, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        case float():
            return b"G" + np.array(value, ">f8").tobytes()
        case str():
            raw = value.encode()
            return b"X" + len(raw).to_bytes(4, "little") + raw
        case tuple():
            return b"(" + b"".join(map(_steps, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_steps, value)) + b"e"
        case dict():
            pairs = (_steps(each) for pair in value.items() for each in pair)
            return b"}(" + b"".join(pairs) + b"u"
        case Name():
            module, _, name = value.full.rpartition(".")
            return f"c{module}\n{name}\n".encode()
        case Call():
            return _steps(Name(value.name)) + _steps(value.arguments) + b"R"
        case Made():
            return _steps(Name(value.name)) + b")\x81" + _steps(value.state) + b"b"
        case Persistent():
            return _steps(value.identity) + b"Q"
    raise TypeError(value)


def storage(key: str, kind: str, numel: int, legacy: bool = False) -> Persistent:
    identity = ("storage", Name(f"torch.{KINDS[kind]}"), key, "cpu", numel)
    return Persistent((*identity, None) if legacy else identity)


def tensor(of: Persistent, shape: tuple, strides: tuple, offset: int = 0) -> Call:
    arguments = (of, offset, shape, strides, False, Call("collections.OrderedDict", ()))
    return Call("torch._utils._rebuild_tensor_v2", arguments)


def strides(array: np.ndarray) -> tuple:
    return tuple(stride // array.dtype.itemsize for stride in array.strides)


def state_dict(arrays: dict[str, np.ndarray], legacy: bool = False) -> dict[str, Call]:
    """Each array over a storage of its own, whose key is its number."""
    return {
        name: tensor(
            storage(str(key), array.dtype.name, array.size, legacy), array.shape, strides(array)
        )
        for key, (name, array) in enumerate(arrays.items())
    }


def write_zip(path, tree: Any, storages: dict[str, bytes], root="archive", **others: bytes):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}/data.pkl", tree if isinstance(tree, bytes) else pickled(tree))
        for name, content in others.items():
            archive.writestr(f"{root}/{name.replace('_pkl', '.pkl')}", content)
        for key, content in storages.items():
            archive.writestr(f"{root}/data/{key}", content)
        archive.writestr(f"{root}/version", b"3\n")
    return path


def write_legacy(path, tree: Any, storages: dict[str, np.ndarray]):
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    magic = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
    content = magic + b"".join(map(pickled, (1001, system, tree, list(storages))))
    for array in storages.values():
        content += array.size.to_bytes(8, "little") + array.tobytes()
    path.write_bytes(content)
    return path
