"""Batched gathers and scatters say the same without batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import spec, to_saved_model
from tests.export.models import random

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
