"""``1 - x.T`` and ``1 / x.T`` keep their sides, whatever is moved or folded on the way."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy import special

from pax_export.export import load, spec, to_tflite
from tests.closeness import assert_close

X = np.abs(np.random.default_rng(0).normal(size=(3, 8, 2))).astype(np.float32) + 0.5
W = np.abs(np.random.default_rng(1).normal(size=(2, 8))).astype(np.float32) + 0.5


def models(t):
    """Constants before something transposed, in operations and in what they are made of."""
    return {
        "number": 1 - t,
        "row": W[0] - t,
        "matrix": W - 0.1 * t,
        "negated": W + (-t),
        "quotient": 1 / t,
        "quotients": W / t,
        "powers": t**-2,
        "complement": special.erfc(t),
        "whole": 3 - t.astype(jnp.int32),
    }


@pytest.mark.parametrize("shape", ["batch, 8, 2", "3, 8, 2"])
def test_a_constant_stays_the_first_side(shape, tmp_path):
    def apply(params, x):
        return models(x.swapaxes(1, 2))

    to_tflite(({}, apply), tmp_path / "m.tflite", spec(shape), validate=False)
    found = load(tmp_path / "m.tflite")(X)
    for name, expected in models(jnp.asarray(X).swapaxes(1, 2)).items():
        assert_close(found[name], expected, rtol=1e-5)
