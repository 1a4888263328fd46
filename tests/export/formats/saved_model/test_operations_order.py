"""Graphs of TensorFlow's operations whose results depend on the order of numbers, beside jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import spec, to_saved_model
from tests.export.formats.saved_model.test_operations import _operators

tf = pytest.importorskip("tensorflow")
NAN, INF = np.nan, np.inf
FLOATS = np.array(
    [[1, NAN, 3, NAN], [INF, -INF, INF, 0], [-0.0, 0, -0.0, 0], [-INF] * 4, [NAN] * 4], np.float32
)
INTEGERS = np.array([[2**31 - 1, -(2**31), 2**31 - 1, 5], [-(2**31)] * 4], np.int32)


def _extremes(x):
    return jnp.argmax(x, -1), jnp.argmin(x, -1), jnp.argmax(x), jnp.argmin(x)


def _of_halves(x):
    return jnp.argmax(x.astype("bfloat16"), -1), jnp.argmin(x.astype("float16"), 0)


def _of_rows(x):
    return jnp.argmax(x, -1), jnp.cumprod(x, 0), jnp.cumprod(x, 1)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (_extremes, FLOATS),
        (_of_halves, FLOATS),
        (_extremes, INTEGERS),
        (_extremes, INTEGERS.view(np.uint32)),
        (_extremes, INTEGERS > 0),
        (_of_rows, FLOATS[:2]),
        (_of_rows, np.zeros((0, 4), np.float32)),
        (_of_rows, INTEGERS),
        (lambda x: jax.lax.cumprod(x, 1, reverse=True), FLOATS),
        (lambda x: x // jnp.uint32(3), INTEGERS.view(np.uint32)),
    ],
)
def test_results_are_those_of_jax(tmp_path, function, x):
    inputs = spec("b, 4", x.dtype.name)
    to_saved_model(function, tmp_path / "m", inputs, operations="tensorflow", validate=False)
    assert "XlaCallModule" not in _operators(tmp_path / "m")
    found = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"](tf.constant(x))
    for name, value in zip(sorted(found), jax.tree.leaves(jax.jit(function)(x)), strict=True):
        assert found[name].dtype.name == value.dtype.name
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(("shape", "mode"), [("b, 5, 3", "reduced"), ("b, 3, 5", "complete")])
def test_qr_has_a_kernel(tmp_path, shape, mode):
    def factors(x):
        return jnp.linalg.qr(x, mode=mode)

    to_saved_model(factors, tmp_path / "m", spec(shape), operations="tensorflow")
    assert "Qr" in _operators(tmp_path / "m")
