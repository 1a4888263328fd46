"""The stored form of a tree: arrays by dotted names, and a JSON entry per leaf.

Entries have the original dtype where orbax's format lacks it, and a CRC-32.

    an array                   itself               {"dtype": "float32", "shape": [2, 3]}
    typed PRNG keys            their uint32 data    {"dtype": "key<threefry2x32>", "shape": []}
    uint4, int2, uint2         as int8 or uint8     {"dtype": "uint4", "shape": [8]}
    arrays without elements    not at all           {"dtype": "float32", "shape": [0, 3]}
    numbers, text of Python    not at all           {"value": 3}
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.jax import is_key
from pax_export._foundations.types import Array, DTypeLike, PyTree
from pax_export.checkpoint._orbax import ABOUT
from pax_export.weights import Description, describe_array, explain_absence, leaves_by_name

#: Values of Python that JSON restores exactly.
Plain = bool | int | float | str

_WIDER = {"uint4": np.uint8, "uint2": np.uint8, "int2": np.int8}


def name_leaves(tree_name: str, tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted name; a single leaf has the name of the tree."""
    return {tree_name: tree} if jax.tree_util.all_leaves([tree]) else leaves_by_name(tree)


def full_name(tree_name: str, name: str) -> str:
    """Returns the name of a leaf in reports and errors: ``model.modules.0.weight``."""
    return tree_name if name == tree_name else f"{tree_name}.{name}"


@dataclass(frozen=True)
class LeafEntry:
    """The original type of a saved leaf."""

    description: Description | str  # its shape and dtype, or a description of the value
    value: Plain | None = None  # the leaf itself, if it is stored in the entry
    checksum: int | None = None  # of the stored array, if known

    @classmethod
    def of(cls, leaf: Any) -> LeafEntry:
        """Creates the entry of a leaf, or of a shape and dtype."""
        if is_plain(leaf):
            return cls(f"a Python {type(leaf).__name__}", leaf)
        return cls(describe_array(leaf))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LeafEntry:
        """The inverse of `to_json`; raises KeyError or TypeError for invalid JSON."""
        if "value" in fields:
            return cls.of(fields["value"])
        description = Description(tuple(fields["shape"]), str(fields["dtype"]))
        return cls(description, checksum=fields.get("crc32"))

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON data."""
        if isinstance(self.description, str):
            return {"value": self.value}
        fields = {"dtype": self.description.dtype, "shape": list(self.description.shape)}
        return fields if self.checksum is None else {**fields, "crc32": self.checksum}

    @property
    def on_disk(self) -> bool:
        """Whether the leaf has an array on disk."""
        return not isinstance(self.description, str) and 0 not in self.description.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return 0 if isinstance(self.description, str) else math.prod(self.description.shape)

    @property
    def stored_as_another(self) -> bool:
        """Whether the array on disk has another dtype."""
        return self.on_disk and (self._algorithm is not None or self._dtype in _WIDER)

    def stored(self, leaf: Array) -> Any:
        """Returns the array to write for the leaf."""
        if self._algorithm is not None:
            return jax.random.key_data(leaf)
        return leaf.astype(_WIDER[self._dtype]) if self._dtype in _WIDER else leaf

    def restored(self, array: Array) -> Any:
        """Converts a stored array to the leaf."""
        if self._algorithm is not None:
            return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=self._algorithm)
        return array.astype(np.dtype(self._dtype)) if self._dtype in _WIDER else array

    def without_array(self) -> Any:
        """Returns the leaf, if it has no array on disk."""
        if isinstance(self.description, str):
            return self.value
        if self._algorithm is None:
            return np.empty(self.description.shape, np.dtype(self._dtype))
        return jax.random.split(jax.random.key(0, impl=self._algorithm), self.description.shape)

    @property
    def _dtype(self) -> str:
        return "" if isinstance(self.description, str) else self.description.dtype

    @property
    def _algorithm(self) -> str | None:
        name = self._dtype
        return name[len("key<") : -1] if name.startswith("key<") else None


def is_plain(leaf: object) -> bool:
    """Returns True for Python values; numpy scalars count as arrays."""
    return isinstance(leaf, Plain) and not isinstance(leaf, np.generic)


def saved_trees(trees: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays to write, by tree and name, and the JSON entries of all leaves."""
    if not trees or ABOUT in trees:
        raise InvalidArgumentError(
            f"A checkpoint has at least one tree, and none with its own name {ABOUT!r}.",
            got=", ".join(trees) or "no trees",
            write="save(step, model=model, optimizer=optimizer)",
        )
    arrays: dict[str, dict[str, Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    for tree_name, tree in trees.items():
        about[tree_name] = {}
        for name, leaf in name_leaves(tree_name, tree).items():
            if not is_plain(leaf):
                _require_value(full_name(tree_name, name), leaf)
            entry = LeafEntry.of(leaf)
            if entry.on_disk:
                if not isinstance(leaf, jax.Array):
                    leaf = np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
                array = entry.stored(leaf)
                if jax.process_count() > 1 and getattr(array, "is_fully_addressable", False):
                    array = np.asarray(array)  # of this process alone: the first one writes it
                arrays.setdefault(tree_name, {})[name] = array
                entry = replace(entry, checksum=array_checksum(array))
            about[tree_name][name] = entry.to_json()
    return arrays, about


def _require_value(where: str, leaf: object) -> None:
    problem = explain_absence(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        problem = f"{type(leaf).__name__}: {leaf!r}"[:200]
    elif not is_key(leaf.dtype) and np.dtype(leaf.dtype).kind in "OSUMm":
        problem = f"an array of {np.dtype(leaf.dtype).name}"
    if problem:
        raise InvalidArgumentTypeError(
            "A checkpoint stores arrays of numbers with their values, numbers and text of Python.",
            where=where,
            got=problem,
            write="the results of the last step, outside of jit; anything else as a static "
            "attribute of a module",
        )


class StoredArray:
    """An array on disk with `name`, shape and dtype; `read` and ``numpy.asarray`` do not cache."""

    __slots__ = ("_read", "dtype", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], Any]):
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._read = read

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return self.size * int(self.dtype.itemsize)

    def read(self) -> Any:
        """Reads the array as numpy, or as a jax array of typed keys."""
        return self._read()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if is_key(self.dtype):
            raise TypeError("keys are not numbers: use jax.random.key_data(array.read())")
        array = self._read()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self.name}: {self.dtype}{list(self.shape)})"


#: Alignment at which other libraries can use memory without a copy.
_ALIGNMENT = 64


def on_host(array: Array) -> np.ndarray:
    """Gathers an array into numpy, without the cache that ``numpy.asarray`` keeps on jax arrays."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if len(shards) == 1:
        return _on_one_device(shards[0].data)
    whole = _aligned_empty(array.shape, array.dtype)
    for shard in shards:
        whole[shard.index] = _on_one_device(shard.data)
    return whole


def _on_one_device(array: jax.Array) -> np.ndarray:
    if next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)  # the same memory
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # jax is limited to other platforms
        return np.array(array)
    return np.asarray(jax.device_put(array, cpu))


def _aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def array_checksum(array: Array) -> int | None:
    """Returns the CRC-32 of an array; None if other processes have parts of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    flat = np.ascontiguousarray(on_host(array)).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data)
