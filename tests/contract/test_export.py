"""Every layer lowered by jax.export with a symbolic batch, in either mode."""

import jax
import pytest

from tests.contract.table import assert_close, each_row


@each_row
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_symbolic_batch(row, training):
    module = row.build().train() if training else row.build().eval()
    symbolic = row.symbolic_inputs()
    exported = jax.export.export(jax.jit(lambda *inputs: row.run(module, *inputs)[1]))(*symbolic)
    sizes = ({"b": 1, "t": 2, "h": 5, "w": 4}, {"b": 5, "t": 3, "h": 4, "w": 7})
    for size in sizes if _has_symbols(row) else sizes[:1]:
        inputs = row.inputs(**size)
        assert_close(exported.call(*inputs), row.run(module, *inputs)[1])


def _has_symbols(row) -> bool:
    return any(letter.isalpha() for shape in row.symbolic for letter in shape)
