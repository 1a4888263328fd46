"""The one way in which tests compare numbers that were rounded on the way.

Two programs that compute one thing may add in another order, on another machine or with other
instructions.  Each sum rounds at the size of its terms: what stands near zero because large terms
cancelled is off by as much as the large values beside it.  So every value of an array is allowed
the same distance, which grows with the largest of them; relative to itself alone, a value near
zero agrees on one machine and fails on the next.

Nothing but numpy is imported: `tests/consumers/test_served*.py` run where there is no jax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# What no test has to choose: eight roundings of the largest value, and in float64 some thousand.
# Half precision needs a choice: one rounding of bfloat16 is near to the 1 % that must be noticed.
_OF_FLOAT32 = 1e-6
_OF_FLOAT64 = 1e-12
# One percent of the largest value is noticed at every place, whatever a test allows of a value.
_OF_SCALE = 5e-3


def assert_close(
    actual: Any, expected: Any, rtol: float | None = None, atol: float = 0.0, where: str = ""
) -> None:
    """Fails unless every value is as near to the expected one as rounding explains.

    That is within `rtol` of itself or of the largest expected value, whichever is more; but of
    the largest, never more than half a percent, however large `rtol` is.

    Shapes must be equal, a number's shape being (), and NaN and infinities stand at the same
    places.  Dtypes may differ: a reference is often of float64.  Two arrays of integers or of
    booleans are compared exactly, whatever is allowed.

    Args:
        actual: An array, or what numpy makes one of: a list of numbers, a tensor.
        expected: The array to compare with, whose largest finite value is the scale.  Where all
            of it is zero, only `atol` allows anything.
        rtol: The part of a value, and of the scale, that is allowed.  Without it 1e-6, or 1e-12
            where both are of float64.
        atol: What is allowed besides, however small the expected values are.
        where: Comes first in the message.
    """
    __tracebackhide__ = True
    actual, expected = np.asarray(actual), np.asarray(expected)
    if "O" in (actual.dtype.kind, expected.dtype.kind):
        raise TypeError(f"{where}: no arrays of numbers: {actual!r:.100}, {expected!r:.100}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{where}: shape {actual.shape} instead of {expected.shape}")
    if _is_exact(actual) and _is_exact(expected):
        np.testing.assert_array_equal(actual, expected, where)
        return
    both_double = _is_double(actual) and _is_double(expected)
    actual, expected = _in_double(actual), _in_double(expected)
    if rtol is None:
        rtol = _OF_FLOAT64 if both_double else _OF_FLOAT32
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], where)
    actual, expected = actual[finite], expected[finite]
    sizes = np.abs(expected)
    scale = sizes.max(initial=0.0)
    allowed = atol + np.maximum(rtol * sizes, min(rtol, _OF_SCALE) * scale)
    with np.errstate(invalid="ignore"):
        apart = np.abs(actual - expected)
        wrong = ~(apart <= allowed)  # so is a NaN
    if wrong.any():
        worst = np.argmax(np.where(wrong, np.nan_to_num(apart, nan=np.inf) - allowed, -np.inf))
        raise AssertionError(
            f"{where}\nthe largest expected value is {scale:.6g}: {allowed[worst]:.3g} is allowed"
            f"\nMismatched elements: {wrong.sum()} / {finite.size}"
            f"\nthe worst is {actual[worst]} instead of {expected[worst]}"
        )


def is_close(actual: Any, expected: Any, rtol: float | None = None, atol: float = 0.0) -> bool:
    """Whether `assert_close` passes; another shape is an error here too, and not a difference."""
    if np.shape(actual) != np.shape(expected):
        raise ValueError(f"shapes {np.shape(actual)} and {np.shape(expected)} are not comparable")
    try:
        assert_close(actual, expected, rtol, atol)
    except AssertionError:
        return False
    return True


def _is_exact(array: np.ndarray) -> bool:
    return array.dtype.kind in "biu"


def _is_double(array: np.ndarray) -> bool:
    return array.dtype in (np.float64, np.complex128)


def _in_double(array: np.ndarray) -> np.ndarray:
    """Of float64 or complex128, bfloat16 as well, which numpy calls a void."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
