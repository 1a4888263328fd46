"""Weights in several files, with an index or numbered."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from pax_export._foundations.errors import WeightsFileError, a_few
from pax_export._foundations.files.paths import read_small_file
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
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


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


def numbered(path: Path) -> list[Path]:
    """The files of a folder that are named as the parts of one, and have no index."""
    files: dict[tuple[str, ...], dict[int, Path]] = {}
    for each in sorted(path.iterdir()):
        if each.suffix in (".safetensors", ".bin") and (name := _NUMBERED.fullmatch(each.name)):
            files.setdefault((name[1], name[3], name[4]), {})[int(name[2])] = each
    has_one = any((path / name).exists() for name in _WHOLE) or any(path.glob(f"*{_ENDING}"))
    if len(files) != 1 or has_one:
        return []
    (((_, count, _), found),) = files.items()
    if len(found) != int(count):
        raise WeightsFileError(
            "Some of the files of weights are missing.",
            where=str(path),
            got=f"{len(found)} of {int(count)}, among them {next(iter(found.values())).name}",
            write="the whole folder",
        )
    return list(found.values())


def read_numbered(path: Path, files: list[Path], read_file: Callable[[Path], Source]) -> Source:
    """Reads the arrays of all numbered files of a folder."""
    with refuse_damaged(str(path), KIND):
        shards = {file.name: read_file(file) for file in files}
        where: dict[str, str] = {}
        for file, shard in shards.items():
            if twice := where.keys() & shard.entries.keys():
                raise ValueError(f"arrays in two of its files: {a_few(sorted(twice), 8)}")
            where |= dict.fromkeys(shard.entries, file)
        return _joined(str(path), shards, where)


def read(path: Path, read_file: Callable[[Path], Source]) -> Source:
    """Reads the arrays of all files of an index."""
    with refuse_damaged(str(path), KIND):
        index = json.loads(read_small_file(path, _LARGEST))
        files = index["weight_map"]
        shards = {name: read_file(_path_beside(path, name)) for name in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in shards[file].entries:
                got = f"the file {shards[file].where}, which has no such array"
                raise damage_error(f"{name} in {path}", KIND, got)
        return _joined(str(path), shards, files)


def _joined(where: str, shards: dict[str, Source], files: dict[str, str]) -> Source:
    """Returns one source of several; `files` has the file of each array."""
    kinds = {shard.kind for shard in shards.values()}
    if len(kinds) != 1:
        raise ValueError(f"files of the kinds {sorted(kinds)}")
    entries = {name: shards[file].entries[name] for name, file in files.items()}
    tied = {name: first for each in shards.values() for name, first in each.tied.items()}
    entries |= {name: each.entries[name] for each in shards.values() for name in each.tied}
    others = [name for shard in shards.values() for name in shard.entries if name not in entries]
    if others:
        raise ValueError(f"arrays that the index does not name: {a_few(others, 8)}")
    metadata = {key: value for each in shards.values() for key, value in each.metadata.items()}
    return Source(kinds.pop(), where, entries, metadata=metadata, tied=tied)


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
