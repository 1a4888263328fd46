"""numpy arrays and scalars in PyTorch pickles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pax_export._types import PyTree
from pax_export.weights.sources._pickle_machine import Buildable, Global

_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_NUMBERS = "biufc"


def known_global(module: str, name: str) -> Global | None:
    """What a name stands for; None for all that is not an array and no number."""
    full = f"{module}.{name}"
    if full == "_codecs.encode":
        return Global(full, _encode_bytes)
    if module not in _MODULES and not module.startswith("numpy.dtypes"):
        return None
    if module.startswith("numpy.dtypes") and name.endswith("DType"):
        return Global(full, lambda: PickledDtype(name.removesuffix("DType").lower()))
    build = {"dtype": PickledDtype, "scalar": _make_scalar, "_reconstruct": PickledArray}.get(name)
    return Global(full, build) if build or name == "ndarray" else None


class PickledDtype(Buildable):
    """A dtype of numbers; objects, texts and records are none."""

    def __init__(self, name: Any, *_: object):
        self.dtype = np.dtype(name if isinstance(name, str) and len(name) < 20 else "O")
        if self.dtype.kind not in _NUMBERS:
            raise ValueError(f"numbers of the dtype {name!r:.50} in a pickle")

    def build(self, state: PyTree) -> None:
        """Takes the order of bytes, the only part of the state that a number has."""
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class PickledArray(Buildable):
    """An array, whose shape and numbers come after it."""

    def __init__(self, *_: object):
        self.array: np.ndarray | None = None

    def build(self, state: PyTree) -> None:
        """Takes the shape, the dtype and the bytes."""
        _, shape, kind, fortran, content = state
        if not isinstance(kind, PickledDtype) or not isinstance(content, (bytes, bytearray)):
            raise ValueError("an array in a pickle that is not one of numbers")
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array in a pickle with sizes that are none")
        if math.prod(shape) * kind.dtype.itemsize != len(content):
            raise ValueError(f"an array in a pickle of {len(content)} bytes, for {list(shape)}")
        array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(kind.dtype.newbyteorder("="))


def _make_scalar(kind: object, content: object) -> Any:
    if not isinstance(kind, PickledDtype) or not isinstance(content, (bytes, bytearray)):
        raise ValueError("a number of numpy in a pickle that is none")
    return np.frombuffer(content, kind.dtype, 1)[0].item()


def _encode_bytes(text: str, encoding: object = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise ValueError("bytes in a pickle that are written in no known way")
    return text.encode("latin1")
