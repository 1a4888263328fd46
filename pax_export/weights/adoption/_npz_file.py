"""Weights as numpy keeps arrays: an .npz file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import UnsupportedDtypeError
from pax_export._files import npz
from pax_export.weights._file import whole_file


def write_npz(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes arrays under their names, whole or not at all, over nothing but one of ours."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise UnsupportedDtypeError(
                "numpy's files have no place for an array of this dtype.",
                where=name,
                got=array.dtype,
                write="a path that ends with .safetensors",
            )
    with whole_file(path, npz.recognized) as temporary:
        npz.write(temporary, arrays)
