"""Orbax checkpoints, read with tensorstore."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pax_export._foundations.files.system import read_small_file
from pax_export._foundations.optional import require
from pax_export.core import join_path
from pax_export.weights.sources._source import (
    Entry,
    Source,
    damage_error,
    refuse_damaged,
    several_files_error,
)

KIND = "checkpoint of orbax"
_TREE = "_METADATA"
_LARGEST = 1 << 28
#: A checkpoint of zeros takes little space; larger announced sizes are refused.
_MOST_UNPACKED, _MOST_TIMES = 1 << 30, 1000
_NO_ARRAYS = ("string", "None", "Dict", "List", "Tuple", "NamedTuple", "Custom")


def find_trees(path: Path) -> dict[str, Path]:
    """The folders of trees below a folder, by the names in front of their arrays."""
    if (path / _TREE).is_file():
        return {"": path}
    below = sorted(each for each in path.iterdir() if each.is_dir())
    steps = [each for each in below if each.name.isdigit()]
    found = {each.name: each for each in below if (each / _TREE).is_file() and each not in steps}
    if found or not steps:
        return found if len(found) != 1 else {"": next(iter(found.values()))}
    if len(steps) > 1:
        names = [each.name for each in steps]
        raise several_files_error(str(path), "checkpoints of several steps", names, steps[-1])
    return find_trees(steps[0])


def read(path: Path, found: dict[str, Path]) -> Source:
    """The arrays of the trees of a checkpoint."""
    library = require("tensorstore", "checkpoint", "open_source of a checkpoint of orbax")
    entries: dict[str, Entry] = {}
    metadata: dict[str, Any] = {}
    with refuse_damaged(str(path), KIND):
        for prefix, folder in found.items():
            tree = json.loads(read_small_file(folder / _TREE, _LARGEST))
            room = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            if tree.get("custom_metadata"):
                metadata[prefix or "custom"] = tree["custom_metadata"]
            for leaf in tree["tree_metadata"].values():
                value = leaf["value_metadata"]
                if value["value_type"] in _NO_ARRAYS or value.get("skip_deserialize"):
                    continue
                own = ".".join(str(key["key"]) for key in leaf["key_metadata"])
                name = join_path(prefix, own)
                where = f"{name} in {path}"
                if name in entries:
                    raise ValueError(f"two arrays with the name {name!r:.200}")
                with refuse_damaged(where, KIND):
                    spec = _tensorstore_spec(folder, own, tree)
                    entries[name] = _make_entry(where, library, spec, room)
    return Source("orbax", str(path), entries, metadata=metadata)


def _tensorstore_spec(folder: Path, name: str, tree: dict[str, Any]) -> dict[str, Any]:
    driver = "zarr3" if tree.get("use_zarr3") else "zarr"
    base = f"{folder.resolve()}/"
    if tree.get("use_ocdbt", True):
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": base}, "path": f"{name}/"}
    else:
        if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"the array {name!r:.200}, whose path leads out of the folder")
        store = {"driver": "file", "path": f"{base}{name}/"}
    return {"driver": driver, "kvstore": store}


def _make_entry(where: str, library: ModuleType, spec: dict[str, Any], room: int) -> Entry:
    store = library.open(spec, open=True, read=True).result()
    dtype = np.dtype(store.dtype.numpy_dtype)
    sizes = (math.prod(store.shape), math.prod(store.chunk_layout.read_chunk.shape or (1,)))
    most = max(_MOST_UNPACKED, _MOST_TIMES * room)
    if max(sizes) * dtype.itemsize > most:
        raise damage_error(where, KIND, f"{max(sizes) * dtype.itemsize} bytes in {room}")
    return Entry(
        where, KIND, store.shape, dtype,
        lambda: np.asarray(store.read().result()),
        lambda index: np.asarray(store[index].read().result()),
    )  # fmt: skip
