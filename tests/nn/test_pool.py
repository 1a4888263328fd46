import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn, pool
from tests.refusals import refused

WINDOWS = [
    ((1, 2, 3, 1), (1, 2, 2, 1)),
    ((1, 3, 3, 1), (1, 1, 2, 1)),
    ((1, 1, 2, 1), (1, 2, 3, 1)),  # steps over elements
    ((2, 2, 1, 2), (1, 1, 1, 3)),  # over batch and channels too
]


PAIRS = [[(0, 1), (0, 1), (0, 0)], [(2, 0), (0, 1), (0, 0)], [(0, 0), (1, 1), (2, 2), (0, 0)]]


@pytest.mark.parametrize(("window", "strides", "padding"), [
    *((*window, padding) for window in WINDOWS for padding in ("SAME", "VALID")),
    *(((1, 3, 3, 1), (1, 2, 2, 1), pairs) for pairs in PAIRS),
])  # fmt: skip
def test_numbers(window, strides, padding):
    x, whole = drawn(2, 7, 5, 4), padding
    if not isinstance(padding, str):
        whole = [(0, 0)] * (4 - len(padding)) + padding
    largest = pool(x, window, strides, whole, np.max)
    np.testing.assert_array_equal(pax.max_pool(x, window, strides, padding), largest)
    mean = pool(x, window, strides, whole, np.mean)
    assert_close(pax.avg_pool(x, window, strides, padding), mean, rtol=1e-5, atol=1e-5)


def test_pairs_of_padding_leave_the_size_to_the_caller():
    sizes = jax.export.symbolic_shape("2*half, odd")
    pooled = jax.jit(lambda x: pax.max_pool(x, (2, 2, 1), (2, 2, 1), [(0, 1), (0, 1), (0, 0)]))
    x = jax.ShapeDtypeStruct((1, *sizes, 3), jnp.float32)
    half, odd = jax.eval_shape(pooled, x).shape[1:3]
    assert half == sizes[0] // 2 and odd == (sizes[1] - 1) // 2 + 1


def test_missing_axes_at_the_front_are_1():
    x = drawn(2, 8, 6, 3)
    for function in (pax.max_pool, pax.avg_pool):
        short = function(x, (2, 2, 1), (2, 2, 1), "SAME")
        assert (short == function(x, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")).all()


@pytest.mark.parametrize(("channel_axis", "window"), [
    (-1, (1, 2, 2, 1)), (1, (1, 1, 2, 2)), (None, (1, 2, 2, 2)),
])  # fmt: skip
@pytest.mark.parametrize("function", [pax.max_pool, pax.avg_pool])
def test_a_single_integer_is_for_the_spatial_axes_and_deprecated(function, channel_axis, window):
    x = drawn(2, 4, 6, 8)
    with pytest.warns(DeprecationWarning) as caught:
        y = function(x, 2, 2, "VALID", channel_axis)
    assert (y == function(x, window, window, "VALID")).all()
    for warning, argument in zip(caught, ("window_shape", "strides"), strict=True):
        assert f"{function.__name__}.{argument}" in str(warning.message)
        assert str(window[1:]) in str(warning.message)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_single_1_is_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (pax.max_pool(drawn(2, 3, 1), 1, 1, "SAME") == drawn(2, 3, 1)).all()


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_integers(dtype):
    x = (drawn(1, 4, 4, 1) * 10).astype(dtype)
    window = (1, 2, 2, 1)
    largest = pax.max_pool(x, window, window, "SAME")
    assert largest.dtype == dtype
    assert (largest == pool(x, window, window, "SAME", np.max)).all()
    mean = pax.avg_pool(x, window, window, "SAME")
    assert mean.dtype == jnp.float32
    assert_close(mean, pool(x, window, window, "SAME", np.mean), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    x = jnp.full((1, 64, 64, 1), 100.0, dtype)  # the sum would overflow in float16
    window = (64, 64, 1)
    mean = pax.avg_pool(x, window, window, "VALID")
    assert mean.dtype == dtype and float(mean[0, 0, 0, 0]) == 100
    assert pax.max_pool(-x, window, window, "SAME").dtype == dtype
    assert float(pax.max_pool(-x, window, window, "SAME")[0, 0, 0, 0]) == -100


def test_booleans():
    x = jnp.array([[[False], [True], [False], [False]]])
    assert pax.max_pool(x, (2, 1), (2, 1), "VALID")[0, :, 0].tolist() == [True, False]


@pytest.mark.parametrize(("message", "arguments"), [
    ("avg_pool.padding", ((2, 1), (2, 1), "FULL")),
    ("avg_pool.padding", ((2, 1), (2, 1), [(0, 1)] * 4)),
    ("avg_pool.padding", ((2, 1), (2, 1), [(0, 2), (0, 0)])),  # a window of padding alone
    ("avg_pool.padding", ((2, 1), (2, 1), [(-1, 0), (0, 0)])),
    ("avg_pool.padding", ((2, 1), (2, 1), [0, 1])),
    ("avg_pool.padding", ((2, 1), (2, 1), None)),
    ("avg_pool.window_shape", ((1, 1, 2, 1), (2, 1), "SAME")),
    ("avg_pool.strides", ((2, 1), (1, 1, 1, 1), "SAME")),
    ("avg_pool.window_shape", ((0, 1), (2, 1), "SAME")),
    ("avg_pool.channel_axis", ((2, 1), (2, 1), "SAME", 3)),
    ("avg_pool.channel_axis", ((2, 1), (2, 1), "SAME", -4)),
])  # fmt: skip
def test_arguments_that_make_no_sense(message, arguments):
    with refused(ValueError, message) as error:
        pax.avg_pool(drawn(1, 4, 2), *arguments)
    assert isinstance(error.value, AssertionError)
