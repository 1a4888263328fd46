"""Writing an .npz file: a zip archive with one .npy in it for each array."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedDtypeError
from pax_export._files.replacing import Belongs
from pax_export.weights._file import whole_file

_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written


def write_npz(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes arrays under their names, whole or not at all."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise UnsupportedDtypeError(
                "numpy's files have no place for an array of this dtype.",
                where=name,
                got=array.dtype,
                write="a path that ends with .safetensors",
            )
    with (
        whole_file(path, zip_of_weights) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", _DATE)
            with archive.open(info, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def zip_of_weights(path: Path) -> Belongs | None:
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
