"""TensorFlow checkpoints and SavedModel variables: a LevelDB index, data files, object graphs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from pax_export._foundations.wire import (
    LEVELDB_MAGIC,
    TENSORFLOW_DTYPES,
    Memory,
    Message,
    MessageFields,
    SavedTensor,
    masked_crc32c,
    message,
    read_varint,
    table_entries,
)
from pax_export.weights._binary_file import BinaryFile
from pax_export.weights.sources._source import (
    Entry,
    InputFile,
    Source,
    refuse_damaged,
    several_files_error,
    unsupported_dtype_error,
)

KIND = "checkpoint of TensorFlow"
_INDEX, _GRAPH = ".index", b"_CHECKPOINTABLE_OBJECT_GRAPH"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_STRING = 7
_DTYPES = {number: name for number, name in TENSORFLOW_DTYPES.items() if number != _STRING}
_MOST_SHARDS = 10_000
_LONGEST_VARINT = 10


def in_folder(path: Path) -> Path | None:
    """The index of the variables of a SavedModel, or of the checkpoint of a folder."""
    if (path / "variables" / f"variables{_INDEX}").is_file():
        return path / "variables" / f"variables{_INDEX}"
    if (path / "checkpoint").is_file():
        with BinaryFile(path / "checkpoint") as file:
            text = file.begin(10_000).decode("utf-8", "replace")
        latest = re.search(r'^model_checkpoint_path: "([^"/\\]+)"', text, re.MULTILINE)
        if latest and (path / f"{latest[1]}{_INDEX}").is_file():
            return path / f"{latest[1]}{_INDEX}"
    found = sorted(path.glob(f"*{_INDEX}"))
    if len(found) > 1:
        names = [each.name for each in found]
        raise several_files_error(str(path), "several checkpoints", names, found[0].with_suffix(""))
    return found[0] if found else None


def of_prefix(path: Path) -> Path | None:
    """Returns the index of a checkpoint given by its prefix, as in TensorFlow."""
    index = path.with_name(f"{path.name}{_INDEX}")
    return index if not path.exists() and index.is_file() else None


def matches(file: InputFile) -> bool:
    end = file.read(file.size - 8, 8) if file.size >= 48 else b""
    return end == LEVELDB_MAGIC


def read(file: InputFile) -> Source:
    """The variables of a checkpoint, by the names that they were given."""
    saved: dict[str, SavedTensor] = {}
    names: list[tuple[str, str]] = []
    shards = 1
    for key, content in table_entries(file):
        value = Message(Memory(content))
        if key == b"":
            shards = _count_shards(value)
        elif key == _GRAPH:
            graph = SavedTensor(value)
            names = _read_names(graph, _data_file(file, shards, graph.shard))
        else:
            saved[key.decode()] = SavedTensor(value)
    found = _keys_by_name(saved, names)
    entries = {}
    for name, key in found.items():
        each, where = saved[key], f"{name} in {file.where}"
        if each.dtype != _STRING:
            data = _data_file(file, shards, each.shard)
            with refuse_damaged(where, KIND):
                entries[name] = _make_entry(where, each, data, _note_of_key(key))
    tied = _tied_names(names, found, saved)
    metadata = {"keys": {name: found[name] for name in entries}}
    return Source(
        "tensorflow", file.where, entries, metadata=metadata, tied=tied, origin="tensorflow"
    )


def _count_shards(header: Message) -> int:
    fields = MessageFields(header)
    if fields.whole(2):
        raise ValueError("numbers in the order of a big-endian machine")
    if not 0 < fields.whole(1) <= _MOST_SHARDS:
        raise ValueError(f"{fields.whole(1)} files of numbers")
    return fields.whole(1)


def _data_file(index: InputFile, count: int, number: int) -> InputFile:
    if number >= count:
        raise ValueError(f"the file {number} of {count}")
    return index.open_other(index.path.with_suffix(f".data-{number:05d}-of-{count:05d}"))


def _make_entry(where: str, saved: SavedTensor, file: InputFile, note: str) -> Entry:
    if saved.dtype not in _DTYPES:
        got = f"the dtype {saved.dtype} of TensorFlow"
        raise unsupported_dtype_error(where, got, _DTYPES.values())
    dtype = np.dtype(_DTYPES[saved.dtype])
    if saved.size != math.prod(saved.shape) * dtype.itemsize:
        raise ValueError(f"{saved.size} bytes of {dtype}{saved.shape}")
    return Entry.stored(
        file, where, KIND, saved.shape, dtype, saved.offset, note,
        None if saved.crc is None else lambda content: masked_crc32c(content) == saved.crc,
    )  # fmt: skip


def _read_names(saved: SavedTensor, file: InputFile) -> list[tuple[str, str]]:
    """Pairs of a variable's key and the name it was given, in the order of the graph.

    The graph is the one text of an array of texts: its length, a checksum of that, and the text.
    """
    file.require(saved.offset, saved.size)
    head = file.read(saved.offset, min(saved.size, _LONGEST_VARINT))
    length, begin = read_varint(head, 0, len(head))
    if begin + 4 + length > saved.size:
        raise ValueError("a text that is longer than its place")
    graph = Message(file, saved.offset + begin + 4, length)
    nodes = (MessageFields(message(node)) for number, node in graph.fields() if number == 1)
    attributes = (MessageFields(each) for node in nodes for each in node.messages(2))
    return [(each.text(3), each.text(2)) for each in attributes]


def _keys_by_name(saved: dict[str, SavedTensor], names: list[tuple[str, str]]) -> dict[str, str]:
    """The keys by names: that which a variable was given, or its key where two have one name."""
    by_name: dict[str, list[str]] = {}
    for key, name in names:
        if key in saved:
            by_name.setdefault(name, []).append(key)
    found: dict[str, str] = {}
    for name, keys in by_name.items():
        same = len({saved[key].same for key in keys}) == 1
        if name and same and name != "Variable" and name not in saved:
            found[name] = keys[0]
            keys = keys[1:]
        found |= {key.removesuffix(_SUFFIX): key for key in keys}
    chosen = set(found.values())
    for key in saved:
        if key not in chosen:
            found.setdefault(key.removesuffix(_SUFFIX), key)
    return found


def _tied_names(
    names: list[tuple[str, str]], found: dict[str, str], saved: dict[str, SavedTensor]
) -> dict[str, str]:
    keys = {key: name for key, name in names if name in found}
    return {
        name: keys[key]
        for name, key in found.items()
        if keys.get(key, name) != name and saved[key].same == saved[found[keys[key]]].same
    }


def _note_of_key(key: str) -> str:
    """Returns the note of a variable that belongs to no net; optimizers also list the net's own."""
    if "/.OPTIMIZER_SLOT/" in key or re.search(r"(^|/)optimizer/(?!_trainable_)", key):
        return "optimizer"
    return "metric" if "keras_api/metrics/" in key else ""
