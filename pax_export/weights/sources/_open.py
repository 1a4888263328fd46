"""`open_source`: selects the reader by the content of a file."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

from pax_export._foundations.errors import WeightsFileError, a_few
from pax_export._foundations.files.own_files import some_names
from pax_export._foundations.files.system import read_small_file
from pax_export.weights._hub import local_path
from pax_export.weights.sources import _mapping, _orbax, _tensorflow
from pax_export.weights.sources._source import (
    InputFile,
    Reader,
    Source,
    damage_error,
    refuse_damaged,
    several_files_error,
)

_INDEX = "index of weights"
_ENDING = ".index.json"
_LARGEST = 200_000_000
#: The names that one file of weights has in a folder of Hugging Face.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


def _readers() -> Iterator[Reader]:
    room = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(sys.modules[room].__path__):
        module = importlib.import_module(f"{room}.{info.name}")
        if hasattr(module, "matches"):
            yield cast(Reader, module)


#: In the order in which they are asked: those of formats without a signature at the end.
READERS = sorted(_readers(), key=lambda each: not getattr(each, "HAS_SIGNATURE", True))

_KINDS = [*(each.KIND for each in READERS), _INDEX, _orbax.KIND, _mapping.KIND]
_READABLE = f"one of these: {', '.join(_KINDS)}"


def open_source(
    source: object, *, keep_quantized: bool = False, revision: str | None = None
) -> Source:
    """Opens a file of weights of any framework, or a mapping of arrays.

    The format is detected by content. No code of the file runs, and arrays are read on use.

    Args:
        source: the path of a file or folder; ``"organization/name"``, a model of the Hugging Face
            Hub (extra ``[hub]``); a mapping of names to arrays, possibly nested; or a module.
        keep_quantized: return low-bit arrays as integers instead of dequantizing them. An array
            ``w`` of a GGUF file is then an entry ``w`` of int8, one ``w.scales`` and perhaps one
            ``w.minima``, each with a number per block of neighbors along the last axis:
            ``w * scales + minima``.
        revision: a branch, tag or commit of the model on the Hub.

    Returns:
        The open `Source`, a context manager.

    Raises:
        WeightsFileError: (an OSError) the format is unknown, or the file is corrupted or unsafe.
        MissingWeightsFileError: the path does not exist.
        UnsupportedDtypeError: an array has a dtype that neither numpy nor jax has.
        MissingPackageError: the package that reads the format is not installed.

    Example:
        >>> import numpy as np, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "net.npz")
        >>> np.savez(path, kernel=np.ones((2, 3), np.float32), bias=np.zeros(3))
        >>> with open_source(path) as source:
        ...     print(source.kind, source.entries, source.entries["bias"].read())
        npz {'kernel': float32[2,3], 'bias': float64[3]} [0. 0. 0.]
    """
    if isinstance(source, Source):
        return source
    if not isinstance(source, (str, os.PathLike)):
        return _mapping.read(source)
    path = local_path(os.fsdecode(source), revision)
    with ExitStack() as resources:
        read = _read_folder if os.path.isdir(path) else _read_file
        with refuse_damaged(str(path), "source of weights"):
            found = read(path, resources, keep_quantized)
        return found.closing(resources.pop_all())


def _read_folder(path: Path, resources: ExitStack, keep_quantized: bool) -> Source:
    if shards := _numbered(path):
        read = partial(_read_file, resources=resources, keep_quantized=keep_quantized)
        return _read_numbered(path, shards, read)
    file = _tensorflow.in_folder(path) or _weights_in_folder(path)
    if file is not None:
        return _read_file(file, resources, keep_quantized)
    trees = _orbax.find_trees(path)
    if trees:
        return _orbax.read(path, trees)
    raise WeightsFileError(
        "The folder has no weights file.",
        where=str(path),
        got=f"a folder with {some_names(path)}",
        write=_READABLE,
    )


def _read_file(path: Path, resources: ExitStack, keep_quantized: bool) -> Source:
    if _is_index(path):
        return _read_index(path, lambda shard: _read_file(shard, resources, keep_quantized))
    path = _tensorflow.of_prefix(path) or path
    file = InputFile(path, keep_quantized=keep_quantized, resources=resources)
    for reader in READERS:
        if reader.matches(file):
            with refuse_damaged(file.where, reader.KIND):
                return reader.read(file)
    raise WeightsFileError(
        "The format of the source is unknown.",
        where=file.where,
        got=file.beginning_text,
        write=_READABLE,
    )


# --- weights in several files, with an index or numbered -----------------------------------


def _is_index(path: Path) -> bool:
    return path.name.endswith(_ENDING) and path.is_file()


def _weights_in_folder(path: Path) -> Path | None:
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


def _numbered(path: Path) -> list[Path]:
    """The files of a folder that are named as the parts of one, and have no index."""
    files: dict[tuple[str, ...], dict[int, Path]] = {}
    for each in sorted(path.iterdir()):
        if each.suffix in (".safetensors", ".bin") and (name := _PART.fullmatch(each.name)):
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


def _read_numbered(path: Path, files: list[Path], read_file: Callable[[Path], Source]) -> Source:
    with refuse_damaged(str(path), _INDEX):
        shards = {file.name: read_file(file) for file in files}
        where: dict[str, str] = {}
        for file, shard in shards.items():
            if twice := where.keys() & shard.entries.keys():
                raise ValueError(f"arrays in two of its files: {a_few(sorted(twice), 8)}")
            where |= dict.fromkeys(shard.entries, file)
        return _joined(str(path), shards, where)


def _read_index(path: Path, read_file: Callable[[Path], Source]) -> Source:
    with refuse_damaged(str(path), _INDEX):
        index = json.loads(read_small_file(path, _LARGEST))
        files = index["weight_map"]
        shards = {name: read_file(_path_beside(path, name)) for name in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in shards[file].entries:
                got = f"the file {shards[file].where}, which has no such array"
                raise damage_error(f"{name} in {path}", _INDEX, got)
        return _joined(str(path), shards, files)


def _joined(where: str, shards: dict[str, Source], files: dict[str, str]) -> Source:
    kinds = {shard.kind: shard.origin for shard in shards.values()}
    if len(kinds) != 1:
        raise ValueError(f"files of the kinds {sorted(kinds)}")
    ((kind, origin),) = kinds.items()
    entries = {name: shards[file].entries[name] for name, file in files.items()}
    tied = {name: first for each in shards.values() for name, first in each.tied.items()}
    entries |= {name: each.entries[name] for each in shards.values() for name in each.tied}
    others = [name for shard in shards.values() for name in shard.entries if name not in entries]
    if others:
        raise ValueError(f"arrays that the index does not name: {a_few(others, 8)}")
    metadata = {key: value for each in shards.values() for key, value in each.metadata.items()}
    return Source(kind, where, entries, metadata=metadata, tied=tied, origin=origin)


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
