"""Every layer in train and in eval mode: what changes, and where it may."""

import jax

import pax_export as pax
from pax_export.core import modules_and_leaves
from tests.contract.table import (
    ALWAYS,
    NEVER,
    ROWS,
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
