"""Every layer as a SavedModel with symbolic sizes and gradients, run after loading.

A save costs half a second, so several layers share one: each is a signature of
its own.  Validation loads the SavedModel, calls every signature at two sizes of
all its dimensions, and asks for gradients of the parameters and inputs; it
compares all of it with jax.  Variants of a layer are of the same operations:
`test_symbolic_sizes` and the oracles of `tests/nn` have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import pax_export as pax
from pax_export.export import spec, to_saved_model
from pax_export.export.artifact import dimensions as _dimensions
from tests.contract.table import ALWAYS, ROWS, Row, assert_trees_close, each_compiled_row

SIZES = (2, 3)
GROUPS = 4
SERVED = [row for row in ROWS if row.changes_state != ALWAYS and "," not in row.name]
RECURRENT = ("LSTM", "GRU", "VanillaRNN", "MultiHeadAttention", "Transformer")


class Layers(pax.Module):
    """Some layers of the table, in eval mode."""

    def __init__(self, rows: list[Row]):
        super().__init__()
        self.layers = [row.build().eval() for row in rows]


def method(row: Row, place: int) -> Callable:
    def one(model: Any, x: Any) -> Any:
        return row.call(model.layers[place], x)

    def two(model: Any, x: Any, y: Any) -> Any:
        return row.call(model.layers[place], x, y)

    return {1: one, 2: two}[len(row.symbolic)]


def key_of(row: Row) -> str:
    return "".join(c if c.isalnum() else "_" for c in row.name)


def inputs_of(row: Row) -> tuple[Any, ...]:
    return tuple([spec(shape, row.dtype) for shape in row.symbolic])


@pytest.mark.parametrize("group", range(GROUPS))
def test_results_and_gradients_at_two_sizes(group, tmp_path, monkeypatch):
    monkeypatch.setattr(_dimensions, "SIZES", SIZES)
    rows = SERVED[group::GROUPS]
    report = to_saved_model(
        Layers(rows),
        tmp_path / "model",
        {key_of(row): inputs_of(row) for row in rows},
        methods={key_of(row): method(row, place) for place, row in enumerate(rows)},
        trainable=True,
    )
    assert report.oldest_tensorflow == "2.15"
    assert sorted(report.signatures) == sorted(map(key_of, rows))
    for row in rows:
        # An EMA in eval mode gives what it has, whatever comes in.
        assert report.signatures[key_of(row)].differentiable is not row.name.startswith("EMA")
        dimensions = {size for x in report.signatures[key_of(row)].inputs for size in x.shape}
        words = {word.strip() for shape in row.symbolic for word in shape.split(",")}
        assert {size for size in dimensions if isinstance(size, str)} == {
            word for word in words if not word.isdigit()
        }


def test_batch_and_length_are_symbolic_where_there_is_a_length():
    for row in SERVED:
        if row.name in RECURRENT:
            assert row.symbolic[0].startswith("b, t, ")


def test_a_stream_of_keys_goes_on(tmp_path):
    """The one row that changes its state in every call; its key is no input, so no size is."""
    (row,) = [row for row in ROWS if row.changes_state == ALWAYS]
    report = to_saved_model(
        row.build(),
        tmp_path / "model",
        {"draw": ()},
        methods={"draw": lambda model: row.call(model)},
        state="update",
    )
    assert report.signatures["draw"].assigns


# --- in train mode, lowered by jax.export with symbolic sizes -----------------------------


@each_compiled_row
def test_symbolic_sizes(row):
    module = row.build().train()
    run = jax.jit(lambda *inputs: row.run(module, *inputs)[1])
    exported = jax.export.export(run)(*row.symbolic_inputs())
    inputs = row.inputs(b=5, t=2, h=4, w=7)
    assert_trees_close(exported.call(*inputs), run(*inputs))
