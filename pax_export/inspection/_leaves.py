"""What the arrays of a net are: trained, frozen, or state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export.core import apply_bottom_up, aspect_of, derived, named_leaves, with_class

#: A module has the first of these that an array of it has.
ROLES = TRAINABLE, FROZEN, STATE = "trainable", "frozen", "state"


@dataclass(frozen=True)
class Leaf:
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


def leaves_of(net: Any) -> list[Leaf]:
    """The arrays of a net in tree order."""
    trained = {path for path, _ in named_leaves(net.parameters())}
    parameters = {path for path, _ in named_leaves(_thawed(net).parameters())}

    def role(path: str) -> str:
        if path in trained:
            return TRAINABLE
        return FROZEN if path in parameters else STATE

    return [
        Leaf(path, tuple(leaf.shape), str(leaf.dtype), role(path))
        for path, leaf in named_leaves(net)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]


def _thawed(net: Any) -> Any:
    """The net as if nothing of it were frozen."""

    def thaw(module: Any) -> Any:
        if aspect_of(type(module), "frozen") is None:
            return module
        return with_class(module, derived(type(module), "frozen", None))

    return apply_bottom_up(net, thaw)
