"""Every layer lowered by jax.export with symbolic sizes, in either mode."""

import jax
import pytest

from tests.contract.table import NEVER, ROWS, Row, assert_trees_close

# In both modes; a layer without state does the same in both.
MODES = [
    (row, training)
    for row in ROWS
    for training in (True, False)
    if training or row.changes_state != NEVER
]


def name_of(value: Row | bool) -> str:
    return value.name if isinstance(value, Row) else ("train" if value else "eval")


@pytest.mark.parametrize(("row", "training"), MODES, ids=name_of)
def test_symbolic_sizes(row, training):
    module = row.build().train() if training else row.build().eval()
    run = jax.jit(lambda *inputs: row.run(module, *inputs)[1])
    exported = jax.export.export(run)(*row.symbolic_inputs())
    inputs = row.inputs(b=5, t=2, h=4, w=7) if training else row.inputs(b=1, t=4, h=5, w=4)
    assert_trees_close(exported.call(*inputs), run(*inputs))
