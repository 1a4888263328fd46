"""The comparison of the other tests, and the rules that they and the pages keep."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.closeness import assert_close, is_close
from tests.refusals import refused

HERE = Path(__file__).parent
PAGES = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md"))]
#: Programs of others, which are left as they were written.
STRANGERS = HERE / "compat" / "programs"
OTHER_COMPARISONS = re.compile(
    r"\b(assert_allclose|allclose|isclose|approx|assert_(array_)?almost_equal"
    r"|assert_approx_equal|assert_array_max_ulp|assert_array_almost_equal_nulp)\("
)


def drawn(*shape, dtype=np.float32):
    return np.random.RandomState(0).standard_normal(shape).astype(dtype)


def off(array, part):
    """The array, with its smallest value off by a part of the largest."""
    other = np.array(array, np.float64)
    other.flat[np.abs(other).argmin()] += part * np.abs(other).max()
    return other


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e10])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4)], ids=str)
def test_what_rounding_leaves_near_zero_is_close(shape, scale):
    expected = scale * drawn(*shape)
    assert_close(expected, off(expected, 5e-7))
    assert not is_close(expected, off(expected, 3e-6))
    assert is_close(expected, off(expected, 9e-4), rtol=1e-3)
    assert not is_close(expected, off(expected, 2e-3), rtol=1e-3)


def test_a_sum_whose_large_terms_cancel_is_close():
    """As in a matrix product: relative to itself alone, it is far off."""
    expected = np.array([1.0, 0.003], np.float32)
    actual = expected + np.array([0, 9e-8], np.float32)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert_close(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_percent_of_the_largest_value_is_noticed(dtype):
    expected = drawn(5, 5).astype(dtype)
    for sign in (-1, 1):
        assert not is_close(off(expected, sign * 0.01).astype(np.float32), expected)
    assert_close(expected, expected)


def test_a_coarse_choice_is_coarse_for_large_values_only():
    expected = np.array([100.0, 1.0])
    assert is_close([101.9, 1.0], expected, rtol=0.02)
    assert is_close([100.0, 1.4], expected, rtol=0.02)
    assert not is_close([100.0, 1.6], expected, rtol=0.02)
    assert not is_close([100.0, 2.0], expected, rtol=0.1)


def test_without_a_choice_only_float64_is_compared_as_float64():
    expected = drawn(7, dtype=np.float64)
    assert is_close(off(expected, 5e-13), expected)
    assert not is_close(off(expected, 1e-11), expected)
    assert is_close(expected.astype(np.float32), expected)
    assert is_close(jnp.asarray(expected, jnp.float32), expected.tolist())
    assert is_close(expected.astype(np.complex64), expected.astype(np.complex128))
    assert not is_close(expected + 1e-11j, expected.astype(np.complex128))


def test_a_chosen_distance_is_added():
    assert is_close([0.0], [1e-4], atol=1e-4)
    assert not is_close([0.0], [1.1e-4], atol=1e-4, rtol=0)
    assert is_close([1000.0], [1000.05], atol=0.04, rtol=1e-5)
    assert not is_close([1000.0], [1000.06], atol=0.04, rtol=1e-5)


def test_zeros_have_no_tolerance():
    assert is_close(np.zeros(3), np.zeros(3))
    assert not is_close([0.0, 1e-30], np.zeros(2), rtol=0.1)
    assert is_close([0.0, 1e-7], np.zeros(2), atol=1e-6)
    assert is_close(np.zeros((0, 2)), np.zeros((0, 2)))


def test_nan_and_infinities_must_match():
    expected = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert_close(expected, expected)
    for place in range(3):
        other = expected.copy()
        other[place] = 1.0
        assert not is_close(other, expected) and not is_close(expected, other)
    assert not is_close(expected * -1, expected)
    assert not is_close(np.array([np.nan, np.inf, -np.inf, 1.1]), expected)  # inf is no scale


def test_integers_and_booleans_are_exact():
    large = np.array([2**60, 2**60 + 1])
    assert is_close(large, large)
    assert not is_close(large, large - 1, rtol=0.1, atol=5)
    assert not is_close([True, False], [True, True], atol=1)
    assert is_close(drawn(2) * 0 + 3, [3, 3])


@pytest.mark.parametrize(("a", "b"), [((3,), (1,)), ((3,), ()), ((2, 3), (3, 2)), ((0,), (1,))])
def test_another_shape_is_refused(a, b):
    with refused(AssertionError, "place", str(a), str(b)):
        assert_close(np.ones(a), np.ones(b), atol=9, where="place")
    with refused(ValueError, "not comparable"):
        is_close(np.ones(a), np.ones(b))


def test_failures_name_the_tolerance():
    with pytest.raises(AssertionError) as caught:
        assert_close([1.0, 2.0, 4.1], np.array([1.0, 2.0, 4.0]), rtol=1e-3, atol=1e-3, where="loss")
    message = str(caught.value)
    assert "loss\nthe largest expected value is 4: 0.005 is allowed" in message
    assert "Mismatched elements: 1 / 3" in message


@pytest.mark.parametrize("given", [{"a": np.ones(2)}, ["text"], None])
def test_other_values_are_refused(given):
    with pytest.raises((TypeError, ValueError)):
        assert_close(given, given)


def test_tests_compare_in_one_way():
    own = {HERE / "closeness.py", Path(__file__)}
    found = [
        f"{path.relative_to(HERE)}:{number}"
        for path in sorted(HERE.rglob("*.py"))
        if path not in own and STRANGERS not in path.parents
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OTHER_COMPARISONS.search(line)
    ]
    assert not found, "compare with tests.closeness.assert_close"


def test_pages_compare_with_an_absolute_part():
    """Their programs are for readers, who have numpy's comparison alone."""
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if OTHER_COMPARISONS.search(line) and "atol=" not in line
    ]
    assert not found
