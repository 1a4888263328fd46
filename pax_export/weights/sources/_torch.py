"""PyTorch files: zip archives, legacy pickles and TorchScript, as tensors only."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from pax_export._foundations.errors import UnsupportedDtypeError
from pax_export.weights.sources._mapping import flatten_containers
from pax_export.weights.sources._pickles import (
    PickledArray,
    PickleMachine,
    Storage,
    TorchTensor,
    known_global,
    storage_of_id,
)
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
_LARGEST_PICKLE = 1 << 28
#: The largest size in bytes of an array with more elements than its storage (an expanded one).
_MOST_EXPANDED = 1 << 26


def matches(file: InputFile) -> bool:
    """Whether a file is an archive of PyTorch, or of a version before it wrote archives."""
    if file.archive is None:
        return file.begin(len(_LEGACY)) == _LEGACY
    return _find_root(file.archive) is not None


def _find_root(archive: ZipArchive) -> str | None:
    """The folder of an archive that has the pickle of its tensors."""
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
    file: InputFile, tree: Any, content: ZipStorages | LegacyStorages, prefix: str = ""
) -> Source:
    """The tensors of a tree, by dotted names behind a prefix."""
    leaves, others = flatten_containers(
        tree, lambda each: isinstance(each, (TorchTensor, PickledArray))
    )
    entries = {
        prefix + name: _make_entry(f"{prefix}{name} in {file.where}", leaf, content)
        for name, leaf in leaves.items()
    }
    return Source("torch", file.where, entries, metadata=others, tied=_tied_names(leaves))


def _load_pickle(where: str, archive: ZipArchive, member: str) -> Any:
    machine = PickleMachine(where, known_global, storage_of_id)
    if archive.size(member) > _LARGEST_PICKLE:
        raise ValueError(f"{member!r} has {archive.size(member)} bytes")
    with archive.open(member) as content:
        return machine.load(io.BytesIO(content.read(archive.size(member))))


class ZipStorages:
    """The storages in an archive; each is compared with its checksum once."""

    def __init__(self, archive: ZipArchive, folder: str):
        self._archive, self._folder = archive, folder
        self._checked: set[str] = set()

    def size(self, storage: Storage) -> int:
        """The bytes of a storage."""
        return self._archive.size(self._folder + storage.key)

    def content(self, storage: Storage, check: bool) -> np.ndarray:
        """The bytes, compared with the checksum if they were not before."""
        check = check and storage.key not in self._checked
        content = self._archive.array(self._folder + storage.key, check)
        self._checked |= {storage.key} if check else set()
        return content


def _read_legacy(file: InputFile) -> Source:
    """The tensors of a file of PyTorch before 1.6: pickles, and the storages behind them."""
    stream = file.stream()
    storages: dict[str, Storage] = {}

    def persistent(identity: Any) -> Storage:
        found = storage_of_id(identity)
        storages.setdefault(found.key, found)
        return found

    machine = PickleMachine(file.where, known_global, persistent)
    _, protocol, system, tree = (machine.load(stream) for _ in range(4))
    if protocol != 1001:
        raise ValueError(f"version {protocol!r:.50} of this format")
    _require_little(file.where, system.get("little_endian") is True)
    content = LegacyStorages(file, machine.load(stream), storages, stream.tell())
    return _make_source(file, tree, content)


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

    def content(self, storage: Storage, check: bool) -> np.ndarray:
        """The bytes, which have no checksum."""
        begin, size = self._places[storage.key]
        return self._file.array(np.uint8, (size,), begin)


def _make_entry(
    where: str, leaf: TorchTensor | PickledArray, content: ZipStorages | LegacyStorages
) -> Entry:
    with refuse_damaged(where, KIND):
        if isinstance(leaf, PickledArray):
            array = leaf.array
            if array is None:
                raise ValueError("an array without numbers")
            return Entry(where, KIND, array.shape, array.dtype, lambda: array)
        first, count = _find_window(leaf, content.size(leaf.storage))

        def window(check: bool) -> np.ndarray:
            raw = content.content(leaf.storage, check)[first : first + count]
            aligned = raw.ctypes.data % leaf.dtype.itemsize == 0
            return _view_strided(leaf, raw if aligned else raw.copy())

        return Entry(
            where, KIND, leaf.shape, leaf.dtype,
            lambda: window(True), lambda index: window(False)[index],
        )  # fmt: skip


def _find_window(tensor: TorchTensor, size: int) -> tuple[int, int]:
    """Returns the offset and number of a tensor's bytes in its storage."""
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
