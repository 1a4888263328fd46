"""Products that name an algorithm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import load, spec, to_saved_model
from pax_export.export.lowering.lower import lower_traced
from pax_export.export.tracing.traced import trace
from tests.closeness import assert_close
from tests.export.models import random


def attention(params, x):
    x = x.astype(params["scale"].dtype)
    query = x * params["scale"]
    return jax.nn.dot_product_attention(query, x, x, is_causal=True).astype(jnp.float32)


def test_attention_in_half_precision_runs_in_old_tensorflow_with_gradients(tmp_path):
    params = {"scale": jnp.asarray(0.5, "bfloat16")}
    shape = spec("batch, length, 2, 4")
    report = to_saved_model((params, attention), tmp_path / "m", shape, trainable=True)
    assert report.oldest_tensorflow == "2.15"
    x = random(2, 5, 2, 4)
    assert_close(load(tmp_path / "m")(x), attention(params, x), rtol=2e-2, atol=2e-2)


def lowered(algorithm, kind, result):
    def product(arrays):
        one, other = arrays
        return [jax.lax.dot(one, other, precision=algorithm, preferred_element_type=result)]

    structs = [jax.ShapeDtypeStruct((4, 4), kind)] * 2
    return lower_traced(trace(product, structs), ("tpu",)).portable.stablehlo


PRESETS = jax.lax.DotAlgorithmPreset


@pytest.mark.parametrize("algorithm", [PRESETS.F32_F32_F32, PRESETS.BF16_BF16_F32_X3])
def test_algorithms_beyond_the_dtypes_are_kept(algorithm):
    assert lowered(algorithm, np.float32, np.float32) > (1, 3, 0)


def test_algorithms_implied_by_the_dtypes_are_dropped():
    assert lowered(PRESETS.BF16_BF16_F32, jnp.bfloat16, np.float32) == (0, 9, 0)
    assert lowered(PRESETS.F16_F16_F32, np.float16, np.float32) == (0, 9, 0)
