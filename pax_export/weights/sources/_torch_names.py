"""The global names that PyTorch pickles may use, and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._types import PyTree
from pax_export.weights.sources import _pickled_numpy
from pax_export.weights.sources._pickle_machine import Global, Instance, fill_dict

DTYPES = {
    "float64": "float64", "double": "float64", "float32": "float32", "float": "float32",
    "float16": "float16", "half": "float16", "bfloat16": "bfloat16",
    "int64": "int64", "long": "int64", "int32": "int32", "int": "int32",
    "int16": "int16", "short": "int16", "int8": "int8", "uint8": "uint8",
    "uint16": "uint16", "uint32": "uint32", "uint64": "uint64", "bool": "bool",
    "complex64": "complex64", "cfloat": "complex64",
    "complex128": "complex128", "cdouble": "complex128",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Where numbers lie: under this key in the file, `begin` of them behind its first."""

    key: str
    dtype: np.dtype
    numel: int
    begin: int = 0
    typed: bool = True


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of a pickle: a window on a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


def known_global(module: str, name: str) -> Global | None:
    """What a name stands for; None for all that is no data."""
    full = f"{module}.{name}"
    if module == "__torch__" or module.startswith("__torch__."):
        return Global(full, lambda *_: Instance())  # a class of TorchScript: its attributes
    if module in ("torch", "torch.storage") and name in STORAGES:
        return Global(full, value=_StorageKind(np.dtype(STORAGES[name]), name != "UntypedStorage"))
    if module == "torch" and name in DTYPES:
        return Global(full, value=np.dtype(DTYPES[name]))
    build = _BUILD.get(full)
    if build is not None:
        return Global(full, build)
    return Global(full) if full in _TYPES else _pickled_numpy.known_global(module, name)


@dataclass(frozen=True)
class _StorageKind:
    dtype: np.dtype
    typed: bool


def storage_of_id(identity: object) -> Storage:
    """The storage that a persistent id names, in a zip archive or behind a legacy pickle."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ValueError("a persistent id that names no storage")
    _, kind, key, _, numel, *view = identity
    if not isinstance(kind, Global) or not isinstance(kind.value, _StorageKind):
        raise ValueError("a storage without a dtype")
    key = key.decode() if isinstance(key, bytes) else key
    if not isinstance(key, str):
        raise ValueError("a storage whose key is no text")
    begin = 0
    if view and view[0] is not None:
        _, begin, _ = view[0]
    return Storage(key, kind.value.dtype, _check_size(numel), _check_size(begin), kind.value.typed)


def _check_size(value: PyTree) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} as a size, an offset or a stride")
    return value


def _make_tensor(
    of: object, offset: object, shape: PyTree, strides: PyTree, *others: object
) -> TorchTensor:
    if not isinstance(of, Storage):
        raise ValueError(f"a tensor over a {type(of).__name__}")
    dtypes = [each.value for each in others if isinstance(each, Global)]
    dtype = dtypes[0] if dtypes and isinstance(dtypes[0], np.dtype) else of.dtype
    shape, strides = tuple(map(_check_size, shape)), tuple(map(_check_size, strides))
    if len(shape) != len(strides) or len(shape) > 64:
        raise ValueError(f"a tensor of {len(shape)} sizes and {len(strides)} strides")
    if not of.typed and dtype == of.dtype and not dtypes:
        raise ValueError("a tensor without a dtype")
    return TorchTensor(of, _check_size(offset), shape, strides, dtype)


def _of_type(
    function: Callable[..., Any], kind: object, arguments: Sequence[Any], _: object = None
) -> Any:
    """A tensor of a subclass, which is given as the call that makes it."""
    build = function.build if isinstance(function, Global) else None
    if build is None or build not in (_make_tensor, _first_argument):
        raise ValueError("a subclass of tensors that is made by a function of its own")
    if not isinstance(kind, Global) or kind.name not in _TYPES:
        raise ValueError("a tensor of a class that is not torch's own")
    return build(*arguments)


def _first_argument(data: object, *_: object) -> Any:
    return data


def _make_dict(pairs: object = (), *_: object) -> dict[Any, Any]:
    return fill_dict({}, pairs.items() if isinstance(pairs, dict) else pairs)


def _default_dict(*_: object) -> dict[Any, Any]:
    return {}


def _make_list(values: object = ()) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _make_set(values: PyTree = ()) -> set[Any]:
    return set(fill_dict({}, [(each, None) for each in values]))


def _make_complex(real: PyTree, imaginary: PyTree = 0.0) -> complex:
    return complex(float(real), float(imaginary))


def _device_text(*parts: object) -> str:
    return ":".join(str(part)[:50] for part in parts if isinstance(part, (str, int)))


#: Classes that a pickle may name, but not call.
_TYPES = frozenset(("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"))
_BUILD: dict[str, Any] = {
    "collections.OrderedDict": _make_dict,
    "collections.defaultdict": _default_dict,
    **{
        f"{builtins}.{name}": build
        for builtins in ("builtins", "__builtin__")
        for name, build in (
            ("set", _make_set),
            ("frozenset", _make_set),
            ("dict", _make_dict),
            ("list", _make_list),
            ("complex", _make_complex),
        )
    },
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor,
    "torch._utils._rebuild_parameter": _first_argument,
    "torch._utils._rebuild_parameter_with_state": _first_argument,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _make_list,
    "torch.device": _device_text,
    **{
        f"torch.jit._pickle.{name}": _first_argument
        for name in (
            "build_intlist",
            "build_tensorlist",
            "build_doublelist",
            "build_boollist",
            "restore_type_tag",
        )
    },
}
