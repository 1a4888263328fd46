"""Largest and smallest values of a SavedModel: NaN where jax has NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import load, spec, to_saved_model
from pax_export.export.lowering import lower
from tests.closeness import assert_close

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
    to_saved_model(model, tmp_path / "m", spec("n, 6"), validate=False)
    assert counts and not any(counts)  # once for each lowering
