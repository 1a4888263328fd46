"""`open_source`: selects the reader by the content of a file."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

from pax_export._foundations.errors import WeightsFileError
from pax_export._foundations.files.overwrite_guard import some_names
from pax_export.weights._file import describe_file
from pax_export.weights._hub import local_path
from pax_export.weights.sources import _mapping, _orbax, _sharded, _tensorflow
from pax_export.weights.sources._source import InputFile, Reader, Source, refuse_damaged


def _readers() -> Iterator[Reader]:
    """The modules of this folder that read files."""
    room = __name__.rpartition(".")[0]
    for info in pkgutil.iter_modules(sys.modules[room].__path__):
        module = importlib.import_module(f"{room}.{info.name}")
        if hasattr(module, "matches"):
            yield cast(Reader, module)


#: In the order in which they are asked: those of formats without a signature at the end.
READERS = sorted(_readers(), key=lambda each: not getattr(each, "HAS_SIGNATURE", True))

_KINDS = [each.KIND for each in (*READERS, _sharded, _orbax, _mapping)]
_READABLE = f"one of these: {', '.join(_KINDS)}"


def open_source(
    source: object, *, keep_quantised: bool = False, revision: str | None = None
) -> Source:
    """Opens a file of weights of any framework, or a mapping of arrays.

    The format is detected by content. No code of the file runs, and arrays are read on use.

    Args:
        source: the path of a file or folder; ``"organization/name"``, a model of the Hugging Face
            Hub (extra ``[hub]``); a mapping of names to arrays, possibly nested; or a module.
        keep_quantised: return low-bit arrays as integers instead of dequantizing them. An array
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
            found = read(path, resources, keep_quantised)
        return found.closing(resources.pop_all())


def _read_folder(path: Path, resources: ExitStack, keep_quantised: bool) -> Source:
    if shards := _sharded.numbered(path):
        read = partial(_read_file, resources=resources, keep_quantised=keep_quantised)
        return _sharded.read_numbered(path, shards, read)
    file = _tensorflow.in_folder(path) or _sharded.in_folder(path)
    if file is not None:
        return _read_file(file, resources, keep_quantised)
    trees = _orbax.find_trees(path)
    if trees:
        return _orbax.read(path, trees)
    raise WeightsFileError(
        "The folder has no weights file.",
        where=str(path),
        got=f"a folder with {some_names(path)}",
        write=_READABLE,
    )


def _read_file(path: Path, resources: ExitStack, keep_quantised: bool) -> Source:
    if _sharded.is_index(path):
        return _sharded.read(path, lambda shard: _read_file(shard, resources, keep_quantised))
    path = _tensorflow.of_prefix(path) or path
    file = InputFile(path, keep_quantised=keep_quantised, resources=resources)
    for reader in READERS:
        if reader.matches(file):
            with refuse_damaged(file.where, reader.KIND):
                return reader.read(file)
    raise WeightsFileError(
        "The format of the source is unknown.",
        where=file.where,
        got=describe_file(file),
        write=_READABLE,
    )
