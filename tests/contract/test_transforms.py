"""Every layer under jit, grad, vmap and scan."""

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from tests.contract.table import (
    ROWS,
    assert_trees_close,
    at_index,
    each,
    each_compiled_row,
    each_stateful_row,
    stack,
)
from tests.refusals import refused


@each_compiled_row
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
    assert_trees_close(run(a, *inputs), row.run(a, *inputs))
    assert len(traces) == 1
    run.trace(a.eval(), *inputs)
    assert len(traces) == 2


@each_compiled_row
def test_gradients(row):
    module, inputs = row.build(), row.inputs()

    def loss(parameters, module, *inputs):
        updated, output = row.run(module.update_parameters(parameters), *inputs)
        outputs = jax.tree_util.tree_leaves(output)
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outputs), updated

    run = jax.jit(jax.grad(loss, has_aux=True))
    gradients, updated = run(module.parameters(), module, *inputs)
    assert_trees_close(updated, row.run(module, *inputs)[0])
    for gradient, parameter in zip(
        jax.tree_util.tree_leaves(gradients),
        jax.tree_util.tree_leaves(module.parameters()),
        strict=True,
    ):
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@each_compiled_row
def test_vmap_over_modules_and_inputs(row):
    """A mapped call is the same as a loop, for the state too."""
    modules = [row.build() for _ in range(2)]
    examples = [row.inputs(seed) for seed in range(3)]

    def run_all(module):
        def run(inputs):
            return row.run(module, *inputs)

        return jax.vmap(run, axis_size=len(examples))(stack(*examples))

    mapped = jax.jit(jax.vmap(run_all, axis_size=len(modules)))(stack(*modules))
    for i, module in enumerate(modules):
        for j, inputs in enumerate(examples):
            assert_trees_close(at_index(at_index(mapped, i), j), row.run(module, *inputs))


@each_compiled_row
def test_scan(row):
    module = row.build()
    steps = [row.inputs(seed) for seed in range(3)]

    def step(module, inputs):
        return row.run(module, *inputs)

    last, outputs = jax.lax.scan(step, module, stack(*steps), length=len(steps))
    for i, inputs in enumerate(steps):
        module, output = row.run(module, *inputs)
        assert_trees_close(at_index(outputs, i), output)
    assert_trees_close(last, module)


@each([row for row in ROWS if row.random])
def test_typed_keys(row):
    """The state of a layer may hold the new kind of random key."""
    module = row.build()
    typed = jax.tree_util.tree_map(
        lambda x: jax.random.wrap_key_data(x) if x.dtype == jnp.uint32 else x, module
    )
    updated, output = jax.jit(row.run)(typed, *row.inputs())
    pax.assert_structure_equal(updated, typed)
    expected = row.run(module, *row.inputs())[1]
    if jnp.issubdtype(output.dtype, jax.dtypes.prng_key):
        output = jax.random.key_data(output)
    assert_trees_close(output, expected)


@each_stateful_row
def test_state_does_not_leak_from_a_later_trace(row):
    """jit(pure(f)) is right; pure around a jit is refused."""

    def call(module):
        return jax.jit(lambda: row.call(module, *row.inputs()))()

    with refused(ValueError, "transformation"):
        pax.pure(call)(row.build())
