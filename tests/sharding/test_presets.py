"""Ready-made rules for the library's own layers."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export import transforms as T

MESH = sharding.abstract_mesh(data=2, model=4)


def specs(make, rules):
    rows = sharding.table(jax.eval_shape(make), MESH, rules)
    return {row.path: row.spec for row in rows if any(row.spec)}


def rule_of(make, rules, path):
    return sharding.table(jax.eval_shape(make), MESH, rules)[path].rule


def transformer(dim=64, heads=4):
    return pax.nets.Transformer(dim, heads, 1, 0.1)


COLUMN, ROW, BIAS = (None, "model"), ("model", None), ("model",)
ATTENTION = {
    **{f"{name}_projection.weight": COLUMN for name in ("query", "key", "value")},
    **{f"{name}_projection.bias": BIAS for name in ("query", "key", "value")},
    "output_projection.weight": ROW,
}


def test_data_parallel():
    table = sharding.table(transformer(), MESH, sharding.data_parallel())
    assert {row.spec for row in table} == {()} and table.unmatched == ()


def test_transformer():
    assert specs(transformer, sharding.tensor_parallel()) == {
        **{f"layers.0.attention.{name}": spec for name, spec in ATTENTION.items()},
        "layers.0.dense_block.fc1.weight": COLUMN,
        "layers.0.dense_block.fc1.bias": BIAS,
        "layers.0.dense_block.fc2.weight": ROW,
    }


def test_heads_are_not_cut():
    def make():
        return transformer(48, 6)

    assert not any("attention" in path for path in specs(make, sharding.tensor_parallel()))
    path = "layers.0.attention.query_projection.weight"
    rule = rule_of(make, sharding.tensor_parallel(), path)
    assert rule == "tensor_parallel: 4 does not divide 6 heads"


def test_scanned_blocks():
    class Block(pax.Module):
        def __init__(self):
            super().__init__()
            self.attention = pax.MultiHeadAttention(4, 4, 1.0)
            self.mlp = pax.Sequential(pax.Linear(16, 32), jax.nn.gelu, pax.Linear(32, 16))

    def make():
        return T.Scan(T.Remat(Block), length=4)()

    found = specs(make, sharding.tensor_parallel() & sharding.fully_sharded(min_size=1))
    prefix = "scan_module.remat_module"
    assert found[f"{prefix}.attention.query_projection.weight"] == (None, "data", "model")
    assert found[f"{prefix}.attention.output_projection.weight"] == (None, "model", "data")
    assert found[f"{prefix}.mlp.modules.0.weight"] == (None, "data", "model")
    assert found[f"{prefix}.mlp.modules.2.weight"] == (None, "model", "data")
    assert found[f"{prefix}.mlp.modules.0.bias"] == (None, "model")
    assert found[f"{prefix}.mlp.modules.2.bias"] == (None, "data")


def test_layers_that_were_stacked_by_hand():
    stacked = T.stack_layers([pax.Linear(8, 12) for _ in range(3)])
    table = sharding.table(stacked, MESH, sharding.tensor_parallel())
    assert table["weight"].spec == (None, None, "model")


def test_dense_layers_of_a_sequential_take_turns():
    def make():
        dense = [pax.Linear(8, 8) for _ in range(3)]
        return pax.Sequential(dense[0], jax.nn.relu, dense[1], jax.nn.relu, dense[2])

    assert specs(make, sharding.tensor_parallel()) == {
        "modules.0.weight": COLUMN, "modules.0.bias": BIAS,
        "modules.2.weight": ROW,
        "modules.4.weight": COLUMN, "modules.4.bias": BIAS,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: pax.Linear(8, 8), {"weight": COLUMN, "bias": BIAS}),
        (lambda: pax.Linear(8, 10), {}),
        (lambda: pax.Embed(16, 8), {"weight": ROW}),
        (lambda: pax.Embed(15, 8), {"weight": COLUMN}),
        (lambda: pax.Conv2D(3, 8, 3), {"weight": (None, None, None, "model"), "bias": BIAS}),
        (lambda: pax.Conv1D(3, 8, 3, data_format="NCW"),
         {"weight": (None, None, "model"), "bias": BIAS}),
        (lambda: pax.Conv2DTranspose(3, 8, 3),
         {"weight": (None, None, "model", None), "bias": BIAS}),
        (lambda: pax.BatchNorm2D(8), {}),
    ],
)  # fmt: skip
def test_layers(make, expected):
    assert specs(make, sharding.tensor_parallel()) == expected


def test_resnet():
    def make():
        return pax.nets.ResNet18(3, 10)

    table = sharding.table(jax.eval_shape(make), MESH, sharding.tensor_parallel())
    assert table.unmatched == ()
    split = [row for row in table if any(row.spec)]
    assert len(split) == 20 and {row.spec[-1] for row in split} == {"model"}
    assert table["logits.weight"].rule == "tensor_parallel: 4 does not divide it"
    assert table.bytes_per_device < 0.26 * table.bytes
    whole = sharding.table(jax.eval_shape(make), MESH, sharding.fully_sharded(("data", "model")))
    assert whole.bytes_per_device < 0.14 * table.bytes


def test_fully_sharded_takes_the_largest_axis_that_fits():
    rules = sharding.fully_sharded("model", min_size=8)
    assert specs(lambda: pax.Linear(8, 12), rules)["weight"] == (None, "model")
    assert specs(lambda: pax.Linear(12, 8), rules)["weight"] == ("model", None)
    assert specs(lambda: pax.Linear(8, 13), rules) == {"weight": ("model", None)}
    assert specs(lambda: pax.Linear(8, 8), rules)["weight"] == (None, "model")
    assert specs(lambda: pax.Linear(3, 5), rules) == {}
    assert rule_of(lambda: pax.Linear(3, 5), rules, "weight") == "fully_sharded: 4 divides no axis"
    assert rule_of(lambda: pax.Linear(3, 5), rules, "bias") == "fully_sharded: fewer than 8 numbers"


def test_random_keys_are_never_split():
    def make():
        keys = [pax.Dropout(0.5), jax.random.split(jax.random.key(0), 8)]
        return keys, T.Vmap(pax.RngSeq, axis_size=8)()

    assert specs(make, sharding.fully_sharded(min_size=1)) == {}


def test_layers_of_others_are_left_to_other_rules():
    class Mine(pax.ParameterModule):
        def __init__(self):
            super().__init__()
            self.table = jax.numpy.ones((8, 8))
            self.fc = pax.Linear(8, 8)

    table = sharding.table(Mine(), MESH, sharding.tensor_parallel())
    assert table.unmatched == ("table",)
    rules = sharding.tensor_parallel() | {Mine: {"table": P("data")}}
    assert sharding.table(Mine(), MESH, rules)["table"].spec == ("data",)
