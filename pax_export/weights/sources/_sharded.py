"""Weights in several files with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pax_export._errors import WeightsFileError, a_few
from pax_export._files import bounded
from pax_export.weights.sources._source import (
    Source,
    damage_error,
    refuse_damaged,
    several_files_error,
)

KIND = "index of weights"
_ENDING = ".index.json"
_LARGEST = 200_000_000
#: The names that one file of weights has in a folder of Hugging Face.
_WHOLE = ("model.safetensors", "pytorch_model.bin")


def is_index(path: Path) -> bool:
    """Whether a path is named as the index of several files."""
    return path.name.endswith(_ENDING) and path.is_file()


def in_folder(path: Path) -> Path | None:
    """The one index, or the one file of weights, of a folder; None if it has none."""
    files = sorted(each for each in path.iterdir() if each.is_file())
    for found in (
        [each for each in files if each.name.endswith(_ENDING)],
        [path / name for name in _WHOLE if path / name in files][:1],
        [each for each in files if each.suffix == ".safetensors"],
    ):
        if len(found) > 1:
            names = [each.name for each in found]
            raise several_files_error(str(path), "several files of weights", names, found[0])
        if found:
            return found[0]
    return None


def read(path: Path, read_file: Callable[[Path], Source]) -> Source:
    """Reads the arrays of all files of an index."""
    with refuse_damaged(str(path), KIND):
        index = json.loads(bounded.read_bytes(path, _LARGEST))
        files = index["weight_map"]
        wrong = [name for name in files.values() if not isinstance(name, str)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} as the name of a file")
        shards = {name: read_file(_path_beside(path, name)) for name in sorted(set(files.values()))}
        kinds = {shard.kind for shard in shards.values()}
        if len(kinds) != 1:
            raise ValueError(f"files of the kinds {sorted(kinds)}")
        for name, file in files.items():
            if name not in shards[file].entries:
                got = f"the file {shards[file].where}, which has no such array"
                raise damage_error(f"{name} in {path}", KIND, got)
        entries = {name: shards[file].entries[name] for name, file in files.items()}
        others = [
            name for shard in shards.values() for name in shard.entries if name not in entries
        ]
        if others:
            raise ValueError(f"arrays that the index does not name: {a_few(others, 8)}")
    metadata = {key: value for each in shards.values() for key, value in each.metadata.items()}
    tied = {name: first for each in shards.values() for name, first in each.tied.items()}
    return Source(kinds.pop(), str(path), entries, metadata=metadata, tied=tied)


def _path_beside(path: Path, name: str) -> Path:
    """Returns the path of a file next to the index; names that lead elsewhere are refused."""
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise WeightsFileError(
            "The index refers to a file outside of its folder.",
            where=str(path),
            got=repr(name),
            write="an index whose files are in its folder",
        )
    return path.parent / name
