"""Writes weights as .npz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._files import npz
from pax_export.weights._file import whole_file
from pax_export.weights.adoption._storable import require_dtypes


def write_npz(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    """Writes arrays under their names, whole or not at all, over nothing but one of ours."""
    require_dtypes(
        arrays,
        lambda dtype: dtype.kind in "biufc",
        "numpy's files have no place for an array of this dtype.",
    )
    with whole_file(path, npz.recognized) as temporary:
        npz.write(temporary, arrays)
