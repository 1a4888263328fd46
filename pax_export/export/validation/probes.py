"""Calls far from those that a test draws: inputs that are large, tiny, zero, negative or no number.

A runtime may have another idea than jax of ``sigmoid(1e20)`` or of the largest of NaN and 1.
What differs there, and nowhere else, is no reason to refuse an export; the report lists it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pax_export._jaxpr import jaxpr_primitives
from pax_export.export.artifact.dtypes import is_inexact, is_integer
from pax_export.export.validation.serve import Arrays

#: What all elements of an input of floating-point numbers are, one after the other.
_NUMBERS = (0.0, -1.0, 1e-30, 1e2, -1e2, 1e4, -1e4, 1e10, -1e10, 1e20, -1e20, 1e38, -1e38)
_NO_NUMBERS = (np.nan, np.inf, -np.inf)
#: Primitives that loop until a number is small, which may never happen.
_MAY_NOT_END = {"while", "eigh", "eig", "svd", "schur", "hessenberg"}


@dataclass(frozen=True)
class Probe:
    """What a test needs for such calls of a signature.

    Attributes:
        expected: what jax gives for other inputs.
        differs: where to note what differs.
    """

    expected: Callable[[Arrays], Arrays]
    differs: list[str]


def may_not_end(program: Any) -> bool:
    """Whether a traced program has loops whose end its inputs decide."""
    return not _MAY_NOT_END.isdisjoint(jaxpr_primitives(program))


def probes(case: Any) -> Iterator[tuple[str, str, Any]]:
    """Calls like that of a case, but for one input: its name, what it is, and the call."""
    for name, value in case.inputs.items():
        for number in _values(value.dtype):
            with np.errstate(over="ignore"):
                filled = np.full(value.shape, number).astype(value.dtype)
            inputs = {**case.inputs, name: filled}
            expected = case.probe.expected(inputs)
            yield name, f"{number:g}", dataclasses.replace(case, inputs=inputs, expected=expected)


def _values(dtype: np.dtype) -> Collection[Any]:
    if is_inexact(dtype) and dtype.kind != "c":
        return (*_NUMBERS, *_NO_NUMBERS)
    if is_integer(dtype) and dtype.kind in "iu":
        ends = np.iinfo(dtype)
        return (0, ends.min, ends.max)
    return ()
