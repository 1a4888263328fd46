"""Every layer under a mixed-precision policy: dtypes, values, classes, printing."""

import pickle

import jax
import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export.core import modules_and_leaves
from pax_export.precision import policy_of
from tests.closeness import assert_close
from tests.contract.table import each_compiled_row, each_row, leaves_equal

FULL = jmp.get_policy("p=f32,c=f32,o=f32")
HALF = jmp.get_policy("p=f32,c=f16,o=f32")


def under(policy, module):
    """The module with itself and every submodule under a policy."""
    return module.apply(lambda m: pax.apply_mp_policy(m, policy))


def kinds(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree_util.tree_leaves(tree)]


@each_row
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_policy_in_full_precision_changes_nothing(row, mode):
    module, inputs = getattr(row.build(), mode)(), row.inputs()
    updated, output = row.run(under(FULL, module), *inputs)
    expected = row.run(module, *inputs)
    assert leaves_equal(output, expected[1])
    assert leaves_equal(updated.apply(pax.unwrap_mp_policy), expected[0])


@each_compiled_row
def test_half_precision_is_near_and_keeps_all_dtypes(row):
    module, inputs = row.build(), row.inputs()
    half = under(HALF, module)
    updated, output = jax.jit(row.run)(half, *inputs)
    expected, full_output = row.run(module, *inputs)
    pax.assert_structure_equal(updated, half)
    assert kinds(updated) == kinds(half) == kinds(expected)
    assert output.dtype == full_output.dtype and output.shape == full_output.shape
    if jnp.issubdtype(output.dtype, jnp.floating):
        assert_close(output, full_output, rtol=0.02, atol=0.02)


@each_row
def test_half_inputs_come_back_in_the_output_dtype(row):
    inputs = [x.astype(jnp.float16) if x.dtype == jnp.float32 else x for x in row.inputs()]
    output = jax.eval_shape(lambda m: row.run(m, *inputs)[1], under(HALF, row.build()))
    assert output.dtype != jnp.float16


@each_row
def test_gradients_have_the_param_dtype(row):
    def loss(module):
        _, output = row.run(module, *row.inputs())
        return jnp.sum(output.astype(jnp.float32))

    module = under(HALF, row.build())
    grads = jax.eval_shape(pax.grad(loss), module)
    pax.assert_structure_equal(grads, module.parameters())
    assert {g.dtype for g in jax.tree_util.tree_leaves(grads)} <= {jnp.dtype(jnp.float32)}


@each_row
def test_policies_and_freezing_in_any_order(row):
    module = row.build()
    one = under(HALF, pax.freeze_parameters(module))
    other = pax.freeze_parameters(under(HALF, row.build()))
    structures = [jax.tree_util.tree_structure(m) for m in (one, other)]
    assert structures[0] == structures[1]
    assert leaves_equal(one.apply(pax.unwrap_mp_policy), pax.freeze_parameters(module))
    assert {policy_of(m.eval()) for m in modules_and_leaves(one)[0]} == {HALF}


@each_row
def test_pickle(row):
    module = under(HALF, row.build())
    assert leaves_equal(pickle.loads(pickle.dumps(module)), module)  # of the same classes, too


@each_row
def test_repr_shows_the_policy(row):
    for module in modules_and_leaves(under(HALF, row.build()))[0]:
        assert repr(module).endswith("mp_policy=FHF)")
