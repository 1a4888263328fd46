"""Which reader a source needs: by what is in it, never by the ending of its name alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pax_export._errors import WeightsFileError
from pax_export._files.replacing import some_names
from pax_export.weights.sources import (
    _flax,
    _gguf,
    _hdf5,
    _keras,
    _mapping,
    _npz,
    _onnx,
    _orbax,
    _safetensors,
    _sharded,
    _tensorflow,
    _tflite,
    _torch,
)
from pax_export.weights.sources._binary_file import BinaryFile
from pax_export.weights.sources._source import Source, refusing
from pax_export.weights.sources._zip_archive import ZipArchive

_READABLE = (
    "a file of safetensors or PyTorch, or the index of several; GGUF; Keras (.keras or .h5); "
    "ONNX; a SavedModel or a checkpoint of TensorFlow; TFLite; msgpack of flax; a checkpoint of "
    "orbax; numpy's .npz; or a mapping of names to arrays"
)


def open_source(source: Any, *, keep_quantised: bool = False) -> Source:
    """Opens a file of weights of any framework, or arrays that are there already.

    Nothing of the file is run, and no array is read before it is asked for.

    Args:
        source: the path of a file or folder; or a mapping of names to arrays, which may be
            nested, or a module.  Which format a file has is seen by what is in it.
        keep_quantised: whether arrays of few bits stay integers, instead of being
            dequantised when they are read.  An array ``w`` of a GGUF file is then an entry
            ``w`` of int8, one ``w.scales`` and perhaps one ``w.minima`` with a number for
            each block of neighbours along the last axis: ``w * scales + minima``.

    Returns:
        The open `Source`, to be used in a ``with`` block.

    Raises:
        WeightsFileError: (an OSError) the file is in none of the formats, or damaged, or
            holds what could do harm.
        MissingWeightsFileError: there is nothing at the path.
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
        return _mapping.opened(source)
    path = Path(os.fsdecode(source))
    with ExitStack() as opened:
        read = _of_folder if os.path.isdir(path) else _of_file
        with refusing(str(path), "source of weights"):
            found = read(path, opened, keep_quantised)
        return found.closing(opened.pop_all())


def _of_folder(path: Path, opened: ExitStack, keep: bool) -> Source:
    file = _tensorflow.in_folder(path) or _sharded.in_folder(path)
    if file is not None:
        return _of_file(file, opened, keep)
    trees = _orbax.trees(path)
    if trees:
        return _orbax.opened(path, trees, opened)
    raise _unknown(str(path), f"a folder with {some_names(path)}")


def _of_file(path: Path, opened: ExitStack, keep: bool) -> Source:
    if _sharded.is_index(path):
        return _sharded.opened(path, opened, lambda shard: _of_file(shard, opened, keep))
    file = opened.enter_context(BinaryFile(_tensorflow.of_prefix(path) or path))
    if file.begin(2) == b"PK":
        with refusing(file.where, "zip archive"):
            archive = ZipArchive(file)
        for reader in (_torch, _keras, _npz):
            if reader.recognises(archive):
                return reader.opened(file, opened, keep)
    if _hdf5.recognises(file):
        return _keras.of_hdf5(file, opened)
    if _torch.recognises_legacy(file):
        return _torch.legacy(file, opened)
    for reader in (_gguf, _safetensors, _tflite, _tensorflow, _flax, _onnx):
        if reader.recognises(file):
            return reader.opened(file, opened, keep)
    begin = file.begin(16)
    got = f"a file of {file.size} bytes that begins with {begin!r}"
    pickled = begin[:1] == b"\x80" and begin[1:2] in (b"\2", b"\3", b"\4", b"\5")
    raise _unknown(file.where, "a pickle, which is never loaded" if pickled else got)


def _unknown(where: str, got: str) -> WeightsFileError:
    return WeightsFileError(
        "This is in none of the formats from which weights are read.",
        where=where,
        got=got,
        write=_READABLE,
    )
