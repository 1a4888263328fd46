"""Every layer in train mode lowered by jax.export with symbolic sizes.

In eval mode `test_saved_model.py` exports them, and compares the results of TensorFlow.
"""

import jax

from tests.contract.table import assert_trees_close, each_compiled_row


@each_compiled_row
def test_symbolic_sizes(row):
    module = row.build().train()
    run = jax.jit(lambda *inputs: row.run(module, *inputs)[1])
    exported = jax.export.export(run)(*row.symbolic_inputs())
    inputs = row.inputs(b=5, t=2, h=4, w=7)
    assert_trees_close(exported.call(*inputs), run(*inputs))
