"""Layers take one example without a batch axis, and batches of several axes."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.contract.table import ROWS, assert_trees_close, at_index, each

# These name their axes by number, work on lists of images, or reshape by the batch.
NEEDS_A_BATCH = (
    "LayerNorm, ", "LSTM", "GRU", "VanillaRNN", "Rotary", "Decoder", "ResNet", "Sequential",
    "EMA", "RngSeq", "max_pool", "avg_pool",
)  # fmt: skip
# Fewer axes mean a batch with fewer places to these.
NEEDS_A_BATCH += ("BatchNorm1D, NCW", "GroupNorm")
ANY_RANK = [row for row in ROWS if not row.name.startswith(NEEDS_A_BATCH)]
CONVOLUTIONS = [row for row in ROWS if row.name.startswith(("Conv", "BatchNorm"))]


@each(ANY_RANK)
def test_one_example(row):
    layer = row.build().eval()
    inputs = row.inputs()
    batch = row.call(layer, *inputs)
    one = row.call(layer, *[x[0] for x in inputs])
    assert_close(one, batch[0], atol=1e-6)
    mapped = jax.vmap(lambda *one: row.call(layer, *one))(*inputs)
    assert_close(mapped, batch, atol=1e-6)


@each(CONVOLUTIONS)
def test_a_batch_of_several_axes(row):
    layer = row.build().eval()
    (x,) = row.inputs()
    found = layer(jnp.stack([x, x + 1]))
    assert_close(found, jnp.stack([layer(x), layer(x + 1)]), atol=1e-5)


@pytest.mark.parametrize("cell", [pax.LSTM, pax.GRU, pax.VanillaRNN])
def test_one_step_of_one_example(cell):
    cell = cell(3, 4)
    x = jax.random.normal(jax.random.key(0), (2, 3))
    state, y = cell(cell.initial_state(), x[0])
    of_batch = cell(cell.initial_state(2), x)
    assert_trees_close((state, y), at_index(of_batch, 0))
