"""A zip archive of arrays, as numpy and torch keep them: what both ways of writing one share."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from pax_export._errors import UnsupportedDtypeError
from pax_export._files.replacing import Belongs
from pax_export.weights._file import whole_file

_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written


@contextlib.contextmanager
def written_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive to write to, which takes the place of the file at the path whole or not at all."""
    with (
        whole_file(path, _of_weights) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        yield archive


def member(name: str) -> zipfile.ZipInfo:
    """What an archive says of a file in it."""
    return zipfile.ZipInfo(name, _DATE)


def require_dtypes(
    arrays: Mapping[str, np.ndarray], known: Callable[[np.dtype], bool], what: str
) -> None:
    """Refuses arrays of dtypes that the format has no place for, before anything is written."""
    for name, array in arrays.items():
        if not known(array.dtype):
            raise UnsupportedDtypeError(
                what, where=name, got=array.dtype, write="a path that ends with .safetensors"
            )


def _of_weights(path: Path) -> Belongs | None:
    """Of what lies at a path: numpy's or torch's archive, whoever wrote it, or an empty file."""
    if path.stat().st_size == 0:
        return lambda name: False
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return None
    ours = all(name.endswith(".npy") for name in names) or any(
        name.endswith("/data.pkl") for name in names
    )
    return (lambda name: False) if ours else None
