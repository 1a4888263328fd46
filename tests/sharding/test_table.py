"""The table: sizes, sums, text, and models that fit no machine."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from tests.core.models import Free


def test_rows_and_sums():
    mesh = sharding.abstract_mesh(data=2, model=4)
    layer = pax.Linear(16, 8).map(lambda x: x.astype("bfloat16"))
    table = sharding.table(layer, mesh, {"weight": P(("data", "model"), None)})
    row = table["weight"]
    assert row.shape == (16, 8) and row.shard_shape == (2, 8) and row.dtype == "bfloat16"
    assert (row.bytes, row.bytes_per_device) == (256, 32)
    assert table["bias"].bytes_per_device == 16 and table.unmatched == ("bias",)
    assert (table.bytes, table.bytes_per_device) == (272, 48)
    assert [row.path for row in table] == ["weight", "bias"] and len(table) == 2
    assert table.mesh == {"data": 2, "model": 4}
    with pytest.raises(KeyError):
        table["kernel"]


def test_text():
    mesh = sharding.abstract_mesh(data=2)
    lines = str(sharding.table(pax.Linear(16, 8), mesh, {"weight": P("data", None)})).splitlines()
    assert lines == [
        "leaf    shape    dtype    spec             shard   per device  rule",
        "weight  (16, 8)  float32  P('data', None)  (8, 8)  256 B       'weight'",
        "bias    (8,)     float32  P()              (8,)    32 B        none: replicated",
        "",
        "mesh: data=2, 2 devices",
        "288 B per device of 544 B",
        "no rule is for, so replicated: bias",
    ]


def test_equal_layers_are_one_line():
    mesh = sharding.abstract_mesh(model=2)
    net = pax.Sequential(*[pax.Linear(4, 4) for _ in range(3)], pax.Linear(4, 2))
    rules = {"modules.0.weight": P("model"), "*.weight": P(None, "model")}
    lines = [line.split("  ")[0] for line in str(sharding.table(net, mesh, rules)).splitlines()]
    assert lines[1:5] == [
        "modules.0.weight",
        "modules.*.bias (3 times)",
        "modules.*.weight (2 times)",
        "modules.3.weight",
    ]
    assert lines[-1] == ("no rule is for, so replicated: modules.*.bias (3 times), modules.3.bias")


def test_a_model_of_seventy_billion_parameters():
    def make():
        return Free(embed=pax.Embed(32_000, 8192), body=pax.nets.Transformer(8192, 64, 2, 0.0))

    net = jax.eval_shape(make)
    mesh = sharding.abstract_mesh(data=64, model=8)
    rules = sharding.tensor_parallel() & sharding.fully_sharded()
    table = sharding.table(net, mesh, rules)
    assert table.bytes > 7e9
    assert table.bytes_per_device < table.bytes / 500
    assert table.unmatched == ()
