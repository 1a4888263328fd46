"""ONNX values of the arrays of a traced program.

onnxruntime's kernels support few types, which differ by operator. So every array is carried by one
of five types that nearly all of them support; where jax rounds to half precision or wraps around,
the graph does so after each operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export.export.portable.sizes import is_number as is_number
from pax_export.export.portable.sizes import same_size as same_size

_INTEGERS = {"int32": np.int32, "int64": np.int64, "uint32": np.int32, "uint64": np.int64}


@dataclass(frozen=True, eq=False)
class Value:
    """One array: its name in the graph, and its dtype and shape in jax.

    Attributes:
        known: its value, if it is a literal; in the carrier type.
        thin: the name of a smaller array that broadcasts to it, if there is one.
        bare: whether that is a scalar.
    """

    name: str
    dtype: np.dtype
    shape: tuple[Any, ...]
    known: np.ndarray | None = None
    thin: str | None = None
    bare: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def carrier(self) -> np.dtype:
        return carrier(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.carrier.kind == "f"


def is_complex(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)


def carrier(dtype: Any) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype == np.bool_ or dtype == np.float64:
        return dtype
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return np.dtype(np.float32)
    return np.dtype(_INTEGERS.get(dtype.name, np.int32))


def is_rounded(dtype: Any) -> bool:
    return np.dtype(dtype) != carrier(dtype)


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(same_size, one, other))
