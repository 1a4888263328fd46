"""The global names that PyTorch pickles may use, numpy's among them, and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._types import PyTree
from pax_export.weights._dtypes import NUMPY_NAMES
from pax_export.weights.sources._pickle_machine import Global, Instance, fill_dict

DTYPES = {
    **{name: name for name in (*NUMPY_NAMES.values(), "complex128")},
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32",
    "short": "int16", "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """A storage of numbers: its key in the file, and an offset of `begin` elements."""

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
    """Returns the value of a global name; None if it is not data."""
    full = f"{module}.{name}"
    if module == "__torch__" or module.startswith("__torch__."):
        return Global(full, lambda *_: Instance())  # a class of TorchScript: its attributes
    if module in ("torch", "torch.storage") and name in (*STORAGES, "UntypedStorage"):
        dtype = np.dtype(STORAGES.get(name, "uint8"))
        return Global(full, value=_StorageKind(dtype, typed=name in STORAGES))
    if module == "torch" and name in DTYPES:
        return Global(full, value=np.dtype(DTYPES[name]))
    build = _BUILD.get(full.replace("__builtin__.", "builtins."))
    if build is not None:
        return Global(full, build)
    return Global(full) if full in _TYPES else _known_of_numpy(module, name)


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


def _make_list(values: object = ()) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _make_set(values: PyTree = ()) -> set[Any]:
    return set(fill_dict({}, [(each, None) for each in values]))


#: Classes that a pickle may name, but not call.
_TYPES = frozenset(("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"))
_BUILD: dict[str, Any] = {
    "collections.OrderedDict": _make_dict,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _make_set,
    "builtins.frozenset": _make_set,
    "builtins.dict": _make_dict,
    "builtins.list": _make_list,
    "builtins.complex": lambda real, imaginary=0.0: complex(float(real), float(imaginary)),
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor,
    "torch._utils._rebuild_parameter": _first_argument,
    "torch._utils._rebuild_parameter_with_state": _first_argument,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": _make_list,
    "torch.device": lambda *parts: ":".join(
        str(part)[:50] for part in parts if isinstance(part, (str, int))
    ),
    "torch.jit._pickle.build_intlist": _first_argument,
    "torch.jit._pickle.build_tensorlist": _first_argument,
    "torch.jit._pickle.build_doublelist": _first_argument,
    "torch.jit._pickle.build_boollist": _first_argument,
    "torch.jit._pickle.restore_type_tag": _first_argument,
}


_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_NUMBERS = "biufc"


def _known_of_numpy(module: str, name: str) -> Global | None:
    """Returns the value of a global name of numpy; None if it is not an array or a number."""
    full = f"{module}.{name}"
    if full == "_codecs.encode":
        return Global(full, _encode_bytes)
    if module not in _MODULES and not module.startswith("numpy.dtypes"):
        return None
    if module.startswith("numpy.dtypes") and name.endswith("DType"):
        return Global(full, lambda: PickledDtype(name.removesuffix("DType").lower()))
    build = {"dtype": PickledDtype, "scalar": _make_scalar, "_reconstruct": PickledArray}.get(name)
    return Global(full, build) if build or name == "ndarray" else None


class PickledDtype:
    """A dtype of numbers; objects, texts and records are none."""

    def __init__(self, name: Any, *_: object):
        self.dtype = np.dtype(name if isinstance(name, str) and len(name) < 20 else "O")
        if self.dtype.kind not in _NUMBERS:
            raise ValueError(f"numbers of the dtype {name!r:.50} in a pickle")

    def take_state(self, state: PyTree) -> None:
        """Takes the order of bytes, the only part of the state that a number has."""
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class PickledArray:
    """An array whose shape and data follow later in the pickle."""

    def __init__(self, *_: object):
        self.array: np.ndarray | None = None

    def take_state(self, state: PyTree) -> None:
        """Takes the shape, the dtype and the bytes."""
        _, shape, kind, fortran, content = state
        array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(kind.dtype.newbyteorder("="))


def _make_scalar(kind: PyTree, content: PyTree) -> Any:
    return np.frombuffer(content, kind.dtype, 1)[0].item()


def _encode_bytes(text: str, encoding: object = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError("bytes in a pickle that are written in no known way")
    return text.encode("latin1")
