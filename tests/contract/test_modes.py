"""Every layer in train and in eval mode, and with other axes: what changes, and where it may."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.core import modules_and_leaves
from tests.closeness import assert_close
from tests.contract.table import (
    ALWAYS,
    NEVER,
    ROWS,
    assert_trees_close,
    at_index,
    each,
    each_row,
    each_stateful_row,
    leaves_equal,
)
from tests.refusals import refused


@each_row
def test_modes_reach_every_module(row):
    module = row.build()
    for mode in (True, False):
        switched = module.train() if mode else module.eval()
        assert {m.training for m in modules_and_leaves(switched)[0]} == {mode}
    assert module.eval().train() == module
    assert (module.eval() == module) is False


@each([row for row in ROWS if row.changes_state != ALWAYS])
def test_eval_mode_changes_nothing(row):
    module = row.build().eval()
    updated, _ = row.run(module, *row.inputs())
    assert updated == module  # the same arrays, not equal ones
    row.call(module, *row.inputs())  # needs no pure


@each_row
def test_train_mode_changes_state_and_only_in_pure(row):
    module, inputs = row.build(), row.inputs()
    before = jax.tree_util.tree_map(lambda x: x.copy(), module)
    updated, _ = row.run(module, *inputs)
    assert (updated == module) is (row.changes_state == NEVER)
    assert leaves_equal(module, before)
    assert updated.parameters() == module.parameters()


@each_stateful_row
def test_a_plain_call_in_train_mode_is_refused(row):
    with refused(ValueError, "attribute"):
        row.call(row.build(), *row.inputs())


@each_row
def test_state_keeps_its_types(row):
    """What a scan carries must not change its treedef, shapes or dtypes."""
    module = row.build()
    updated, _ = row.run(module, *row.inputs())
    assert kinds(updated) == kinds(module)
    pax.assert_structure_equal(updated, module)


def kinds(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree_util.tree_leaves(tree)]


# --- one example without a batch axis, and batches of several axes ------------------------


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
