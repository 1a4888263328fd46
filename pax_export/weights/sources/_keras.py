"""Keras files: ``.keras``, ``.weights.h5`` and legacy ``.h5``.

Newer files number a layer's variables; they get the layer's names if the count matches.
Configurations are read as data.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np

from pax_export._foundations.optional import require
from pax_export.weights.sources._source import (
    Entry,
    Index,
    InputFile,
    Source,
    ZipArchive,
    find_tied,
    refuse_damaged,
    unsupported_dtype_error,
)

KIND = "file of Keras"
_MAGIC = b"\x89HDF\r\n\x1a\n"
#: No useful array is packed more tightly; a file may announce any size.
_MOST_UNPACKED, _MOST_TIMES = 1 << 28, 100
_WEIGHTS = "model.weights.h5"
_LARGEST_TEXT = 1 << 26
#: The variables of a layer in order, by the end of its class's name.
_VARIABLES = {
    "batch_normalization": ("gamma", "beta", "moving_mean", "moving_variance"),
    "layer_normalization": ("gamma", "beta"),
    "group_normalization": ("gamma", "beta"),
    "rms_normalization": ("scale",),
    "cell": ("kernel", "recurrent_kernel", "bias"),
    "embedding": ("embeddings",),
    "prelu": ("alpha",),
    "p_re_lu": ("alpha",),
    **dict.fromkeys(("separable_conv1d", "separable_conv2d"),
                    ("depthwise_kernel", "pointwise_kernel", "bias")),
    **dict.fromkeys(("dense", "conv1d", "conv2d", "conv3d", "conv1d_transpose", "conv2d_transpose",
                     "conv3d_transpose", "depthwise_conv1d", "depthwise_conv2d"),
                    ("kernel", "bias")),
}  # fmt: skip
#: Layers that may lack their last variable, the bias.
_WITHOUT_BIAS = frozenset(("kernel", "depthwise_kernel"))


def matches(file: InputFile) -> bool:
    return _WEIGHTS in file.archive if file.archive else file.begin(8) == _MAGIC


def read(file: InputFile) -> Source:
    archive = file.archive
    if archive is None:
        return _read_hdf5(file, 0, file.size, {})
    metadata: dict[str, Any] = {}
    if "metadata.json" in archive:
        metadata = dict(json.loads(archive.read("metadata.json", _LARGEST_TEXT)))
    if "config.json" in archive:
        metadata["config"] = json.loads(archive.read("config.json", _LARGEST_TEXT))
    begin = archive.offset(_WEIGHTS)
    if begin is None:
        unpacked = _unpack_weights(archive, file)
        return _read_hdf5(unpacked, 0, unpacked.size, metadata)
    return _read_hdf5(file, begin, archive.size(_WEIGHTS), metadata)


def _unpack_weights(archive: ZipArchive, file: InputFile) -> InputFile:
    """The weights of an archive that packs them, in a temporary file without a name."""
    archive.size(_WEIGHTS)  # an error if it is a bomb
    with tempfile.NamedTemporaryFile() as temporary:
        with archive.open(_WEIGHTS) as content:
            shutil.copyfileobj(content, temporary)
        temporary.flush()
        return file.open_other(Path(temporary.name), file.where)


def _read_hdf5(file: InputFile, begin: int, size: int, metadata: dict[str, Any]) -> Source:
    library = require("h5py", "adopt", "open_source of a file of Keras")
    root = library.File(file.stream(begin, size), "r")
    groups, found, addresses = _walk(root, lambda this: library.h5o.get_info(this.id).addr)
    top = groups[""].attrs
    metadata |= {name: _text(top[name]) for name in ("keras_version", "backend") if name in top}
    if "model_config" in top:
        metadata["config"] = json.loads(_text(top["model_config"]))
    names = _older_names(groups, found) or _newer_names(groups, found, metadata.get("config"))
    if len(set(names.values())) != len(names):
        names = {path: path for path in names}
    entries: dict[str, Entry] = {}
    for path, name in names.items():
        where = f"{name} in {file.where}"
        note = "optimizer" if path.startswith(("optimizer/", "optimizer_weights/")) else ""
        with refuse_damaged(where, KIND):
            entries[name] = _make_entry(file, begin, where, found[path], note)
    tied = find_tied({name: addresses[path] for path, name in names.items()})
    return Source("keras", file.where, entries, metadata=metadata, tied=tied, origin="keras")


def _walk(root: Any, address_of: Callable[[Any], int]) -> tuple[dict[str, Any], ...]:
    """The groups by path, the arrays in the order in which they were made, and their addresses."""
    groups, arrays, addresses = {"": root}, {}, {}
    seen, waiting = {address_of(root)}, [("", root)]
    while waiting:
        above, group = waiting.pop()
        for name in group:
            path = f"{above}/{name}" if above else name
            kind = type(group.get(name, getlink=True)).__name__
            if kind != "HardLink":  # it may lead to any file of this machine
                raise ValueError(f"{path} is a {kind}, which is not followed")
            this = group[name]
            address = address_of(this)
            if hasattr(this, "keys"):
                if address not in seen:
                    groups[path] = this
                    waiting.append((path, this))
                seen.add(address)
            elif getattr(this, "shape", None) is not None:
                # Others than numbers are texts and tables, which are no weights.
                if this.dtype.kind in "biufcV" and this.dtype.names is None:
                    arrays[path], addresses[path] = this, address
    by_path = {
        path: arrays[path] for path in sorted(arrays, key=lambda each: (addresses[each], each))
    }
    return groups, by_path, addresses


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _make_entry(file: InputFile, begin: int, where: str, dataset: Any, note: str) -> Entry:
    # HDF5 has no bfloat16: Keras writes two bytes without a type.
    dtype = np.dtype("bfloat16" if dataset.dtype == "V2" else dataset.dtype.str)
    if dtype.str[1] == "V" and dtype != "bfloat16":
        raise unsupported_dtype_error(where, f"{dtype.itemsize} bytes of no type", ("numbers",))
    if dataset.is_virtual or dataset.external:
        raise ValueError("an array in another file")
    size = dataset.size * dtype.itemsize
    stored = dataset.id.get_storage_size()
    if size > max(_MOST_UNPACKED, _MOST_TIMES * stored) or (size and not stored):
        raise ValueError(f"{size} bytes of {dtype}{list(dataset.shape)} in {stored}")
    if size and dataset.chunks is None and (offset := dataset.id.get_offset()) is not None:
        return Entry.stored(file, where, KIND, dataset.shape, dtype, begin + offset, note)
    native = dtype.newbyteorder("=")

    def part(index: Index | EllipsisType) -> np.ndarray:
        return np.asarray(dataset[index]).view(dtype).astype(native, copy=False)

    return Entry(where, KIND, dataset.shape, native, lambda: part(...), part, note)


def _older_names(groups: dict[str, Any], found: dict[str, Any]) -> dict[str, str] | None:
    """The names that an older file lists for each layer, these first; None if it lists none."""
    top = "model_weights/" if "model_weights" in groups else ""
    layers = _listed_texts(groups[top.rstrip("/")], "layer_names")
    if not layers:
        return None
    listed = {}
    for layer in layers:
        group = groups.get(f"{top}{layer}")
        for weight in _listed_texts(group, "weight_names") if group else ():
            if f"{top}{layer}/{weight}" in found:
                listed[f"{top}{layer}/{weight}"] = re.sub(r":\d+$", "", weight)
    known = listed if len(set(listed.values())) == len(listed) else {}
    return {path: known.get(path, path.removeprefix(top)) for path in (*listed, *found)}


def _listed_texts(group: Any, name: str) -> list[str]:
    """A list of texts in attributes; a long one is kept in parts with numbers."""
    parts = [name] if name in group.attrs else []
    while f"{name}{len(parts)}" in group.attrs:
        parts.append(f"{name}{len(parts)}")
    return [_text(each) for part in parts for each in group.attrs[part]]


def _newer_names(groups: dict[str, Any], found: dict[str, Any], config: object) -> dict[str, str]:
    """A name for each path ``layers/<class>/.../vars/<number>``; the path where that fails."""
    layers = _configured_names(config)
    counts = Counter(path.rpartition("/")[0] for path in found)
    return {path: _newer_name(groups, path, layers, counts) for path in found}


def _newer_name(
    groups: dict[str, Any], path: str, layers: dict[str, str], counts: Mapping[str, int]
) -> str:
    found = re.fullmatch(r"(?:(.*)/)?vars/([0-9]+)", path)
    if not found:
        return path
    above, number = (found[1] or "").split("/"), found[2]
    parts = []
    for at, each in enumerate(above):
        if each == "layers" and at + 1 < len(above):
            continue
        own = groups.get("/".join([*filter(None, above[: at + 1]), "vars"]))
        name = own.attrs.get("name") if own is not None else None
        parts.append(_text(name or layers.get("/".join(above[: at + 1]), each)))
    variables = _variable_names(above[-1], counts[path.rpartition("/")[0]])
    index = int(number)
    return "/".join([*filter(None, parts), variables[index] if index < len(variables) else number])


def _variable_names(group: str, count: int) -> tuple[str, ...]:
    """Returns the variable names of a group, if it has as many variables as such a layer."""
    kind = re.sub(r"_\d+$", "", group)
    if kind.endswith("_dense"):  # the projections of attention
        kind = "dense"
    names = _VARIABLES.get(kind, ())
    if len(names) == count:
        return names
    return names[:-1] if count == len(names) - 1 and names[0] in _WITHOUT_BIAS else ()


def _configured_names(config: object, path: str = "", depth: int = 0) -> dict[str, str]:
    found: dict[str, str] = {}
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else None
    counts: Counter[str] = Counter()
    for layer in layers if isinstance(layers, list) and depth < 32 else ():
        if not isinstance(layer, dict) or not isinstance(layer.get("config"), dict):
            continue
        kind = _snake_case(str(layer.get("class_name", "")))
        number = counts[kind]
        counts[kind] += 1
        group = f"{path}layers/{kind}{f'_{number}' if number else ''}"
        found[group] = str(layer["config"].get("name", group))
        found |= _configured_names(layer, f"{group}/", depth + 1)
    return found


def _snake_case(name: str) -> str:
    """The name of a class as Keras writes it in files: ``Conv2DTranspose`` is conv2d_transpose."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
