"""Roles of the arrays of a net: trainable, frozen or state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from pax_export._types import PyTree
from pax_export.core import named_roles


@dataclass(frozen=True)
class NetArray:
    """One array of a net."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        # Keys of jax, and dtypes that numpy does not know, say themselves how long they are.
        return self.size * _item_size(self.dtype)


def _item_size(dtype: str) -> int:
    if dtype.startswith("key<"):
        return 16 if "rbg" in dtype else 8
    return np.dtype(jax.numpy.dtype(dtype)).itemsize


def leaves_of(net: PyTree) -> list[NetArray]:
    """The arrays of a net in tree order."""
    return [
        NetArray(path, tuple(leaf.shape), str(leaf.dtype), role)
        for path, leaf, role in named_roles(net)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]
