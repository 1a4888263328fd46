"""`approx_max_k` and `approx_min_k`, which are exact outside of jax."""

import jax
import numpy as np

from pax_export.export import load, spec, to_saved_model
from tests.export.models import random


def nearest(params, x):
    return {
        "max": jax.lax.approx_max_k(x, 3),
        "min": jax.lax.approx_min_k(x * params["scale"], 2, reduction_dimension=0),
        "all": jax.lax.approx_max_k(x, 3, aggregate_to_topk=False)[0].sum(),
    }


def test_they_are_those_of_jax_on_a_cpu_with_gradients(tmp_path):
    report = to_saved_model(
        ({"scale": np.float32(2)}, nearest), tmp_path / "m", spec("n, 40"), trainable=True,
        constraints=("n >= 2",), validate="full",
    )  # fmt: skip
    assert report.oldest_tensorflow == "2.15"
    assert report.largest_error["serving_default: gradient:x"] < 1e-5
    x = random(6, 40)
    values, places = load(tmp_path / "m")(x)["max"]
    np.testing.assert_array_equal(places, np.argsort(-x, axis=1)[:, :3])
    np.testing.assert_array_equal(values, np.take_along_axis(x, places, axis=1))
