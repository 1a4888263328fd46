"""Operations that old readers lack or compute otherwise: products, extremes, top k, indexing."""

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


# --- `approx_max_k` and `approx_min_k`, which are exact outside of jax ---


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


# --- batched gathers and scatters say the same without batches ---


INDEXING = {
    "at": lambda x, i: x[i],
    "put": lambda x, i: x.at[i].set(7.0),
    "add": lambda x, i: x.at[i].add(2.0, mode="drop"),
    "part": lambda x, i: jax.lax.dynamic_slice(x, (i[0],), (2,)),
    "insert": lambda x, i: jax.lax.dynamic_update_slice(x, x[:2] * 3, (i[0],)),
}
at, add = INDEXING["at"], INDEXING["add"]


def indexing(scale, x, i):
    """Everything that becomes a batched gather or scatter, `x[b, 6]` and `i[b, 3]`."""
    x = x * scale
    pairs, places = x.reshape(-1, 2, 3), i[:, :2]
    results = {name: jax.vmap(f)(x, i) for name, f in INDEXING.items()}
    return results | {
        "narrow": jax.vmap(at)(x, i.astype(jnp.int8)),
        "unsigned": jax.vmap(at)(x, i.astype(jnp.uint8)),
        "nested": jax.vmap(jax.vmap(at))(pairs, places),
        "last axis": jax.vmap(at, in_axes=(1, 1), out_axes=1)(x.T, i.T),
        "rows": jax.vmap(lambda p, j: p[j % 2])(pairs, places),
        "outside": jax.vmap(at)(x, i + 4),
        "along": jnp.take_along_axis(x, i, axis=1),
        "counts": jax.vmap(lambda j: jnp.bincount(j, length=4))(i),
        "sorted": jax.vmap(lambda a, j: a[jnp.argsort(a)][j])(x, i),
        "loop": jax.lax.scan(lambda c, j: (jax.vmap(add)(c, j[:, None]), c[:, 0]), x, i.T)[0],
    }


@pytest.mark.parametrize("batch", ["batch", 3])
def test_results_and_gradients_are_the_same(tmp_path, batch):
    """Validation compares all results, and the gradients of the sums of all."""
    report = to_saved_model(
        (jnp.ones(6), indexing),
        tmp_path / "model",
        (spec((batch, 6)), spec((batch, 3), "int32")),
        trainable=True,
    )
    assert report.oldest_tensorflow == "2.15"
    assert max(report.largest_error.values()) < 1e-4


def test_more_batches_than_an_index_has_bits(tmp_path):
    """An int8 cannot count 300 of them, so the indices are widened."""

    def look_up(scale, x, i):
        return jax.vmap(at)(x * scale, i)

    x, i = random(300, 5), np.arange(900).reshape(300, 3).astype(np.int8) % 5
    to_saved_model((jnp.ones(()), look_up), tmp_path / "model", (x, i))
