"""Every layer with state under the lifted transforms, which write its new state back (rule R2).

Of layers without state they are the transforms of jax, see `test_transforms.py`.
"""

import jax
import jax.numpy as jnp

import pax_export as pax
from pax_export import transforms
from tests.contract.table import assert_trees_close, at_index, each_compiled_stateful_row, stack


def changed(transformed):
    """What a transformed call makes of a module, and what it gives."""
    return pax.module_and_value(transformed)


@each_compiled_stateful_row
def test_jit(row):
    module, inputs = row.build(), row.inputs()
    expected = row.run(module, *inputs)
    assert_trees_close(changed(transforms.jit(row.call))(module, *inputs), expected)


@each_compiled_stateful_row
def test_remat_and_its_gradient(row):
    module, inputs = row.build(), row.inputs()

    def loss(call):
        def of_parameters(parameters, module):
            module, output = changed(call)(module.update_parameters(parameters), *inputs)
            outputs = jax.tree_util.tree_leaves(output)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in outputs), module

        return jax.jit(jax.grad(of_parameters, has_aux=True))

    parameters = module.parameters()
    assert_trees_close(
        loss(transforms.remat(row.call))(parameters, module), loss(row.call)(parameters, module)
    )


@each_compiled_stateful_row
def test_vmap_over_modules_and_inputs(row):
    modules, inputs = [row.build() for _ in range(2)], [row.inputs(seed) for seed in range(2)]
    mapped = jax.jit(changed(transforms.vmap(row.call, axis_size=2)))(
        stack(*modules), *stack(*inputs)
    )
    for i, module in enumerate(modules):
        assert_trees_close(at_index(mapped, i), row.run(module, *inputs[i]))


@each_compiled_stateful_row
def test_scan(row):
    module, inputs = row.build(), [row.inputs(seed) for seed in range(3)]

    def step(module, inputs):
        output = row.call(module, *inputs)
        return module, output

    last, outputs = jax.jit(transforms.scan(step, length=3))(module, stack(*inputs))
    for i, each in enumerate(inputs):
        module, output = row.run(module, *each)
        assert_trees_close(at_index(outputs, i), output)
    assert_trees_close(last, module)
