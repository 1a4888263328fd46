"""Dtypes by name, without jax."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

#: The dtype of text in numpy; jax has none, so it never reaches a model.
STRING = np.dtype(object)

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a name in a manifest.

    Example:
        >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("string").kind
        (2, 'O')
    """
    # It registers bfloat16 and others with numpy, as jax and TensorFlow do.
    importlib.import_module("ml_dtypes")
    return STRING if name == "string" else np.dtype(name)


def name_of(dtype: Any) -> str:
    """The inverse of `numpy_dtype`; TensorFlow uses the same names."""
    dtype = np.dtype(dtype)
    return "string" if dtype == STRING else dtype.name


def is_inexact(dtype: np.dtype) -> bool:
    """Whether these are real or complex numbers, the small ones among them.

    Example:
        >>> is_inexact(numpy_dtype("bfloat16")), is_inexact(numpy_dtype("int4"))
        (True, False)
    """
    return dtype.kind in "fc" or dtype.name.startswith(("float", "bfloat"))


def is_integer(dtype: np.dtype) -> bool:
    """Whether these are whole numbers, those of four bits among them."""
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


def narrows(source: object, dtype: np.dtype) -> bool:
    """Whether jax makes this dtype of the given one, as it does with 64-bit numbers."""
    if not isinstance(source, np.dtype):
        return False  # typed keys
    jax: Any = sys.modules.get("jax")
    wide = jax is not None and jax.config.jax_enable_x64
    return (source.name if wide else _NARROW.get(source.name, source.name)) == dtype.name
