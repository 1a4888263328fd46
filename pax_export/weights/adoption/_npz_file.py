"""Writing an .npz file: a zip archive with one .npy in it for each array."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export.weights.adoption._zip_file import member, require_dtypes, written_zip


def write_npz(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes arrays under their names, whole or not at all."""
    require_dtypes(
        arrays,
        lambda dtype: dtype.kind in "biufc",
        "numpy's files have no place for an array of this dtype.",
    )
    with written_zip(path) as archive:
        for name, array in arrays.items():
            with archive.open(member(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
