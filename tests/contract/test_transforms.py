"""Every layer under jit, grad, vmap and scan."""

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from tests.contract.table import NEVER, assert_close, each_row


@each_row
def test_jit_traces_once_for_one_recipe(row):
    traces = []

    @jax.jit
    def run(module, *inputs):
        traces.append(module)
        return row.run(module, *inputs)

    a, b, inputs = row.build(), row.build(), row.inputs()
    updated, _ = run(a, *inputs)
    run(b, *inputs)
    run(updated, *inputs)
    run(a.copy(), *inputs)
    assert len(traces) == 1
    assert_close(run(a, *inputs), row.run(a, *inputs))
    assert len(traces) == 1
    run(a.eval(), *inputs)
    assert len(traces) == 2


@each_row
def test_gradients(row):
    module, inputs = row.build(), row.inputs()

    def loss(parameters, module, *inputs):
        updated, output = row.run(module.update_parameters(parameters), *inputs)
        return jnp.sum(jnp.sin(output.astype(jnp.float32))), updated

    run = jax.jit(jax.grad(loss, has_aux=True))
    gradients, updated = run(module.parameters(), module, *inputs)
    assert_close(updated, row.run(module, *inputs)[0])
    for gradient, parameter in zip(
        jax.tree_util.tree_leaves(gradients),
        jax.tree_util.tree_leaves(module.parameters()),
        strict=True,
    ):
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@each_row
def test_vmap(row):
    """A mapped call is the same as a loop, for the state too."""
    module = row.build()
    examples = [row.inputs(seed) for seed in range(2)]
    if not row.symbolic:
        return
    stacked = jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *examples)
    updated, outputs = jax.vmap(lambda *inputs: row.run(module, *inputs))(*stacked)
    for i, inputs in enumerate(examples):
        # A module that did not change is not mapped over; all others are.
        took = jax.tree_util.tree_map(lambda x: x[i], (updated, outputs))
        assert_close(took, row.run(module, *inputs))


@each_row
def test_vmap_over_modules(row):
    modules, inputs = [row.build(), row.build()], row.inputs()
    stacked = jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *modules)
    size = len(modules)
    _, outputs = jax.vmap(lambda m: row.run(m, *inputs), axis_size=size)(stacked)
    for i, module in enumerate(modules):
        assert_close(outputs[i], row.run(module, *inputs)[1])


@each_row
def test_scan(row):
    module = row.build()
    steps = [row.inputs(seed) for seed in range(3)]
    stacked = jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *steps) if row.symbolic else None

    def step(module, inputs):
        return row.run(module, *(inputs or ()))

    last, outputs = jax.lax.scan(step, module, stacked, length=len(steps))
    for i, inputs in enumerate(steps):
        module, output = row.run(module, *inputs)
        assert_close(outputs[i], output)
    assert_close(last, module)


@each_row
def test_typed_keys(row):
    """The state of a layer may hold the new kind of random key."""
    module = row.build()
    if not row.random:
        return
    typed = jax.tree_util.tree_map(
        lambda x: jax.random.wrap_key_data(x) if x.dtype == jnp.uint32 else x, module
    )
    updated, output = jax.jit(row.run)(typed, *row.inputs())
    pax.assert_structure_equal(updated, typed)
    expected = row.run(module, *row.inputs())[1]
    if jnp.issubdtype(output.dtype, jax.dtypes.prng_key):
        output = jax.random.key_data(output)
    assert_close(output, expected)


@each_row
def test_immutable_under_a_later_trace(row):
    """jit(pure(f)) is right; pure(jit(f)) must not leak tracers."""
    if row.changes_state == NEVER:
        return
    module, inputs = row.build(), row.inputs()
    try:
        pax.pure(jax.jit(row.call))(module, *inputs)
    except ValueError as error:
        assert "jax transformation" in str(error) or "immutable" in str(error)
    else:
        raise AssertionError("a module changed under a trace that began after it was opened")
