"""PyTorch files: zip archives, legacy pickles and TorchScript, as tensors only."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, NoReturn

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError, WeightsFileError
from pax_export.weights._metadata import NUMPY_NAMES
from pax_export.weights.sources._mapping import flatten_containers
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    ZipArchive,
    find_tied,
    refuse_damaged,
)

KIND = "file of PyTorch"
_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_PICKLE = "data.pkl"
#: One byte of a pickle may make a container of 64: a hostile one takes 4 GiB, not more.
_LARGEST_PICKLE = 1 << 26
#: The largest size in bytes of an array with more elements than its storage (an expanded one).
_MOST_EXPANDED = 1 << 26


def matches(file: InputFile) -> bool:
    """Whether a file is an archive of PyTorch, or of a version before it wrote archives."""
    if file.archive is None:
        return file.begin(len(_LEGACY)) == _LEGACY
    return _find_root(file.archive) is not None


def _find_root(archive: ZipArchive) -> str | None:
    found = [name.removesuffix(_PICKLE) for name in archive.names if name.endswith(_PICKLE)]
    found = [root for root in found if root == "" or (root.count("/") == 1 and root[-1] == "/")]
    return found[0] if len(found) == 1 else None


def read(file: InputFile) -> Source:
    return _read_legacy(file) if file.archive is None else _read_archive(file, file.archive)


def _read_archive(file: InputFile, archive: ZipArchive) -> Source:
    root = _find_root(archive) or ""
    if f"{root}byteorder" in archive:
        _require_little(file.where, archive.read(f"{root}byteorder", 100) == b"little")
    tree = _load_pickle(file.where, archive, f"{root}{_PICKLE}")
    found = _make_source(file, tree, ZipStorages(archive, f"{root}data/"))
    if f"{root}constants.pkl" in archive:  # named CONSTANTS.c0 in TorchScript's code
        tree = _load_pickle(file.where, archive, f"{root}constants.pkl")
        constants = ZipStorages(archive, f"{root}constants/")
        found.entries |= _make_source(file, tree, constants, "CONSTANTS.c").entries
    return found


def _make_source(
    file: InputFile, tree: Any, storages: ZipStorages | LegacyStorages, prefix: str = ""
) -> Source:
    """The tensors of a tree, by dotted names behind a prefix."""
    leaves, others = flatten_containers(
        tree, lambda each: isinstance(each, (TorchTensor, PickledArray))
    )
    entries = {
        prefix + name: _make_entry(f"{prefix}{name} in {file.where}", leaf, storages)
        for name, leaf in leaves.items()
    }
    return Source(
        "torch", file.where, entries, metadata=others, tied=_tied_names(leaves), origin="torch"
    )


def _load_pickle(where: str, archive: ZipArchive, member: str) -> Any:
    return _Unpickler(io.BytesIO(archive.read(member, _LARGEST_PICKLE)), where).load()


class ZipStorages:
    """The storages in an archive; each is compared with its checksum once."""

    def __init__(self, archive: ZipArchive, folder: str):
        self._archive, self._folder = archive, folder
        self._checked: set[str] = set()

    def size(self, storage: Storage) -> int:
        """The bytes of a storage."""
        return self._archive.size(self._folder + storage.key)

    def read(self, storage: Storage, first: int, count: int, check: bool) -> np.ndarray:
        """Some bytes of a storage, which is compared with its checksum if it was not before."""
        check = check and storage.key not in self._checked
        content = self._archive.array(self._folder + storage.key, check)
        self._checked |= {storage.key} if check else set()
        return content[first : first + count]


def _read_legacy(file: InputFile) -> Source:
    """The tensors of a file of PyTorch before 1.6: pickles, and the storages behind them."""
    stream = file.stream(0, min(file.size, _LARGEST_PICKLE))
    readers = [_Unpickler(stream, file.where) for _ in range(5)]
    _, protocol, system, tree, keys = (reader.load() for reader in readers)
    if protocol != 1001:
        raise ValueError(f"version {protocol!r:.50} of this format")
    _require_little(file.where, system.get("little_endian") is True)
    return _make_source(file, tree, LegacyStorages(file, keys, readers[3].storages, stream.tell()))


class LegacyStorages:
    """The storages behind the pickles of the older format: a length, then the elements."""

    def __init__(self, file: InputFile, keys: Any, storages: dict[str, Storage], at: int):
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        for key in keys:
            count = int.from_bytes(file.read(at, 8), "little", signed=True)
            size = count * storages[key].dtype.itemsize
            file.require(at + 8, size)
            self._places[key] = (at + 8, size)
            at += 8 + size
        if at != file.size:
            raise ValueError(f"{file.size - at} bytes behind the last storage")

    def size(self, storage: Storage) -> int:
        """The bytes of a storage."""
        return self._places[storage.key][1]

    def read(self, storage: Storage, first: int, count: int, check: bool) -> np.ndarray:
        """Some bytes of a storage, which have no checksum and, in the file, no alignment."""
        return self._file.in_memory(self._places[storage.key][0] + first, count)


def _make_entry(
    where: str, leaf: TorchTensor | PickledArray, storages: ZipStorages | LegacyStorages
) -> Entry:
    with refuse_damaged(where, KIND):
        if isinstance(leaf, PickledArray):
            array = leaf.array
            if array is None:
                raise ValueError("an array without numbers")
            return Entry(where, KIND, array.shape, array.dtype, lambda: array)
        first, count = _find_window(leaf, storages.size(leaf.storage))

        def window(check: bool) -> np.ndarray:
            raw = storages.read(leaf.storage, first, count, check)
            aligned = raw.ctypes.data % leaf.dtype.itemsize == 0
            return _view_strided(leaf, raw if aligned else raw.copy())

        return Entry(
            where, KIND, leaf.shape, leaf.dtype,
            lambda: window(True), lambda index: window(False)[index],
        )  # fmt: skip


def _find_window(tensor: TorchTensor, size: int) -> tuple[int, int]:
    storage, item = tensor.storage, tensor.dtype.itemsize
    if storage.typed and storage.begin == 0 and storage.numel * storage.dtype.itemsize != size:
        raise ValueError(f"a storage of {storage.numel} {storage.dtype}, in {size} bytes")
    first = (storage.begin + tensor.offset) * item
    if 0 in tensor.shape:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
    count = (last + 1) * item
    if first + count > size:
        raise ValueError(f"bytes {first} to {first + count} of a storage of {size} bytes")
    whole = math.prod(tensor.shape) * item
    if whole > max(count, _MOST_EXPANDED):
        raise ValueError(f"an array of {whole} bytes over {count}")
    return first, count


def _view_strided(tensor: TorchTensor, content: np.ndarray) -> np.ndarray:
    if 0 in tensor.shape:
        return np.empty(tensor.shape, tensor.dtype)
    item = tensor.dtype.itemsize
    flat = content.view(tensor.dtype)
    return np.lib.stride_tricks.as_strided(
        flat, tensor.shape, [stride * item for stride in tensor.strides], writeable=False
    )


def _tied_names(leaves: dict[str, Any]) -> dict[str, str]:
    """The names of tensors that are one window on one storage."""
    return find_tied({
        name: (leaf.storage.key, leaf.storage.begin + leaf.offset, leaf.shape, leaf.strides,
               leaf.dtype)
        for name, leaf in leaves.items()
        if isinstance(leaf, TorchTensor) and 0 not in leaf.shape
    })  # fmt: skip


def _require_little(where: str, little: bool) -> None:
    if not little:
        raise UnsupportedDtypeError(
            "The byte order of the file is unsupported.",
            where=where,
            got="a file of a big-endian machine",
            write="safetensors.torch.save_file where the file was made",
        )


# --- pickles: Python's own reader, in which every name is one of ours -----------------


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
_UNTYPED = "torch.storage.UntypedStorage"


class Instance(dict):
    """An object of a class that is nowhere imported: its attributes by name."""

    def take_state(self, state: Any) -> None:
        """Takes the attributes over, as the other objects here do."""
        self.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle._Unpickler):  # the one in C fills a memory for a memo of a high number
    """A pickle calls only what `find_class` returns; nothing here has an effect."""

    stack: list[Any]

    def __init__(self, stream: IO[bytes], where: str):
        super().__init__(stream, encoding="latin1")
        self._where = where
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """One of our functions, a dtype, or the name of a class that is not to be called."""
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full.startswith("__torch__."):
            return Instance  # a class of TorchScript
        if module == "torch" and name in DTYPES:
            return np.dtype(DTYPES[name])
        if module in ("torch", "torch.storage") and name in STORAGES:
            return np.dtype(STORAGES[name])
        if module in ("torch", "torch.storage") and name == "UntypedStorage":
            return _UNTYPED
        if module == "numpy.dtypes" and name.endswith("DType"):
            return lambda: PickledDtype(name.removesuffix("DType").lower())
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
            full = f"numpy.{name}"
        if full not in _KNOWN:
            raise WeightsFileError(
                "The pickle refers to an object that is not a tensor; it is not executed.",
                where=self._where,
                got=f"{module}.{name}"[:200],
                write="torch.save(net.state_dict(), path) or safetensors.torch.save_file, where "
                "the file was made; or, if you trust the file's author, open it with PyTorch",
            )
        return _KNOWN[full]

    def get_extension(self, code: int) -> NoReturn:
        """Refuses objects that another program has registered in this process."""
        raise ValueError(f"the extension {code} in a pickle")

    def persistent_load(self, pid: Any) -> Storage:
        """The storage of an id, in a zip archive or behind a legacy pickle."""
        if not isinstance(pid, list) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise ValueError("a persistent id that names no storage")
        _, kind, key, _, numel, *view = pid
        typed = isinstance(kind, np.dtype)
        if not typed and kind != _UNTYPED:
            raise ValueError("a storage without a dtype")
        key = key.decode() if isinstance(key, bytes) else key
        begin = view[0][1] if view and view[0] is not None else 0
        dtype = kind if typed else np.dtype(np.uint8)
        found = Storage(key, dtype, _check_size(numel), _check_size(begin), typed)
        return self.storages.setdefault(key, found) if begin == 0 else found

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], (Instance, PickledDtype, PickledArray)):
            self.stack[-1].take_state(state)
        elif type(self.stack[-1]) is not dict:  # the attributes of a dict are not weights
            raise ValueError(f"a state for {type(self.stack[-1]).__name__} in a pickle")

    def _tuple(self, count: int) -> None:
        self.stack[len(self.stack) - count :] = [self.stack[len(self.stack) - count :]]

    # Tuples are lists, which are no keys: Python crashes where it hashes a deep one.
    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: _build,
        pickle.TUPLE[0]: pickle._Unpickler.dispatch[pickle.LIST[0]],
        pickle.EMPTY_TUPLE[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.TUPLE1[0]: lambda self: self._tuple(1),
        pickle.TUPLE2[0]: lambda self: self._tuple(2),
        pickle.TUPLE3[0]: lambda self: self._tuple(3),
    }


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


def _check_size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} as a size, an offset or a stride")
    return value


def _make_tensor(
    of: Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *others: Any
) -> TorchTensor:
    dtypes = [each for each in others if isinstance(each, np.dtype)]
    if not isinstance(of, Storage) or not (of.typed or dtypes):
        raise ValueError("a tensor over no storage, or without a dtype")
    shape, strides = tuple(map(_check_size, shape)), tuple(map(_check_size, strides))
    if len(shape) != len(strides) or len(shape) > 64:
        raise ValueError(f"a tensor of {len(shape)} sizes and {len(strides)} strides")
    return TorchTensor(of, _check_size(offset), shape, strides, dtypes[0] if dtypes else of.dtype)


def _of_type(build: Callable[..., Any], kind: str, arguments: Sequence[Any], *_: Any) -> Any:
    """A tensor of a subclass, which is given as the call that makes it."""
    if build not in (_make_tensor, _first_argument) or kind not in _CLASSES:
        raise ValueError("a tensor of a class, or made by a function, that is not torch's own")
    return build(*arguments)


def _first_argument(data: Any, *_: Any) -> Any:
    return data


class PickledDtype:
    """A dtype of numbers; objects, texts and records are none."""

    def __init__(self, name: str, *_: Any):
        self.dtype = np.dtype(name if isinstance(name, str) and len(name) < 20 else "O")
        if self.dtype.kind not in "biufc":
            raise ValueError(f"numbers of the dtype {name!r:.50} in a pickle")

    def take_state(self, state: Sequence[Any]) -> None:
        """Takes the order of bytes, the only part of the state that a number has."""
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class PickledArray:
    """An array whose shape and data follow later in the pickle."""

    def __init__(self, *_: Any):
        self.array: np.ndarray | None = None

    def take_state(self, state: Sequence[Any]) -> None:
        """Takes the shape, the dtype and the bytes."""
        _, shape, kind, fortran, content = state
        array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(kind.dtype.newbyteorder("="))


def _make_scalar(kind: PickledDtype, content: bytes) -> Any:
    return np.frombuffer(content, kind.dtype, 1)[0].item()


def _encode_bytes(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError("bytes in a pickle that are written in no known way")
    return text.encode("latin1")


#: Classes that a pickle may name, but not call: their names.
_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_KNOWN: dict[str, Any] = {
    **{name: name for name in (*_CLASSES, "numpy.ndarray")},
    "collections.OrderedDict": dict,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": set,
    "builtins.frozenset": set,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.complex": complex,
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor,
    "torch._utils._rebuild_parameter": _first_argument,
    "torch._utils._rebuild_parameter_with_state": _first_argument,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Size": list,
    "torch.device": lambda *parts: ":".join(str(part)[:50] for part in parts),
    "torch.jit._pickle.build_intlist": _first_argument,
    "torch.jit._pickle.build_tensorlist": _first_argument,
    "torch.jit._pickle.build_doublelist": _first_argument,
    "torch.jit._pickle.build_boollist": _first_argument,
    "torch.jit._pickle.restore_type_tag": _first_argument,
    "_codecs.encode": _encode_bytes,
    "numpy.dtype": PickledDtype,
    "numpy.scalar": _make_scalar,
    "numpy._reconstruct": PickledArray,
}
