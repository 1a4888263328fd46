"""Products that name an algorithm, and NaN among the largest and smallest values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import load, spec, to_saved_model
from pax_export.export.lowering import lower
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


NAN = np.nan
A = np.array([[NAN, 1, NAN, 2, 0, 3]], np.float32)
B = np.array([[1, NAN, NAN, 1, 5, -3]], np.float32)


def extremes(params, a, b):
    return {
        "maximum": jnp.maximum(a, b),
        "minimum": jnp.minimum(a, b),
        "written_first": jnp.maximum(0.5, b),
        "written_second": jnp.minimum(b, 0.5),
        "clamp": jax.lax.clamp(a, b, a + 1),
        "clamped_value": jax.lax.clamp(b, a, b + 1),
        "clamped_by_numbers": jax.lax.clamp(-1.0, b, 2.0),
        "clip": jnp.clip(b, -1, 2),
        "largest": a.max(-1),
        "smallest": b.min(-1),
        "running": jax.lax.cummax(b, axis=1),
        "pool": jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "VALID"),
        "scattered": jnp.zeros(3).at[jnp.array([0, 0, 1, 1, 2, 2])].max(b[0]),
        "half": jnp.maximum(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)),
        "integers": jnp.maximum(a.shape[0], jnp.arange(3)),
        "twice": jnp.maximum(b, b),
    }


def test_nan_is_kept(tmp_path):
    to_saved_model(({}, extremes), tmp_path / "m", (spec("n, 6"), spec("n, 6")))
    found = load(tmp_path / "m")(A, B)
    for name, expected in jax.jit(extremes)({}, A, B).items():
        assert_close(found[name], expected, where=name)


@pytest.mark.parametrize("written", [-np.inf, 0.0])
def test_a_number_that_is_written_costs_nothing(written, tmp_path, monkeypatch):
    counts = []
    count = lower.keep_nan
    monkeypatch.setattr(lower, "keep_nan", lambda each: counts.append(count(each)))
    model = ({}, lambda params, x: jnp.maximum(x, written))
    to_saved_model(model, tmp_path / "m", spec("n, 6"), operations="xla", validate=False)
    assert counts and not any(counts)  # once for each lowering
