"""Checks that arrays can be stored in a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pax_export._errors import UnsupportedDtypeError


def require_dtypes(
    arrays: Mapping[str, np.ndarray], known: Callable[[np.dtype], bool], what: str
) -> None:
    """Refuses arrays of dtypes that the format has no place for, before anything is written."""
    for name, array in arrays.items():
        if not known(array.dtype):
            raise UnsupportedDtypeError(
                what, where=name, got=array.dtype, write="a path that ends with .safetensors"
            )
