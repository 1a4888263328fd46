"""Which rule is for which leaf, and how rules are put together."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export import transforms as T
from tests.core.models import Free

MESH = sharding.abstract_mesh(data=2, model=4)


@pytest.fixture(scope="module")
def block():
    attention = pax.MultiHeadAttention(4, 2, 1.0)
    return Free(embed=pax.Embed(16, 8), attention=attention, fc=pax.Linear(8, 32))


def specs(tree, rules, mesh=MESH):
    """The specs by path, without those that split nothing."""
    rows = sharding.table(tree, mesh, rules)
    return {row.path: row.spec for row in rows if any(row.spec)}


def test_a_path_fits_whole_and_a_star_crosses_dots(block):
    assert specs(block, {"*.query*.weight": P(None, "model")}) == {
        "attention.query_projection.weight": (None, "model")
    }
    found = specs(block, {"attention.*.weight": P("model")})
    assert len(found) == 4 and set(found.values()) == {("model",)}


def test_a_class_is_for_its_weight(block):
    assert specs(block, {pax.Embed: P("model", None)}) == {"embed.weight": ("model", None)}
    assert specs(block, {pax.Linear: ("data", "model")}).keys() == {
        "fc.weight",
        *[f"attention.{name}_projection.weight" for name in ("query", "key", "value", "output")],
    }


def test_a_class_with_paths_below_it(block):
    rules = {
        pax.MultiHeadAttention: {"query_projection.bias": P("model"), "*.weight": P("data")},
        Free: {"fc.*": P("data")},
    }
    found = specs(block, rules)
    assert found.pop("attention.query_projection.bias") == ("model",)
    assert len(found) == 6 and set(found.values()) == {("data",)}


def test_a_class_is_for_derived_classes_too(block):
    class Mine(pax.Embed):
        pass

    assert specs(Mine(8, 8), {pax.Embed: P("data")}) == {"weight": ("data",)}
    frozen = pax.freeze_parameters(block)
    assert specs(frozen, {pax.Embed: P("data")}) == {"embed.weight": ("data",)}


def test_the_first_rule_counts(block):
    rules = {"fc.weight": P(None, "model"), pax.Linear: P("data")}
    assert specs(block, rules)["fc.weight"] == (None, "model")
    rules = {"fc.weight": None, pax.Linear: P("data")}
    assert "fc.weight" not in specs(block, rules)


def test_a_declared_spec_counts_more_than_rules():
    layer = pax.Linear(8, 8).with_sharding(weight=(None, "model"))
    table = sharding.table(layer, MESH, {"*": P("data")})
    assert table["weight"].spec == (None, "model") and table["weight"].rule == "with_sharding"
    assert table["bias"].spec == ("data",) and table["bias"].rule == "'*'"
    assert specs(layer, None) == {"weight": (None, "model")}


def test_otherwise(block):
    mine = sharding.Rules.of({"fc.weight": P("data")})
    found = specs(block, mine | sharding.fully_sharded("model", min_size=1))
    assert found["fc.weight"] == ("data",)
    assert found["fc.bias"] == ("model",)
    both_ways = {"fc.weight": P("data")} | sharding.fully_sharded("model", min_size=1)
    assert specs(block, both_ways) == found


def test_both(block):
    rules = sharding.Rules.of({"fc.weight": P(None, "model")}) & {"fc.*": P("data")}
    table = sharding.table(block, MESH, rules)
    assert table["fc.weight"].spec == ("data", "model")
    assert table["fc.weight"].rule == "'fc.weight' & 'fc.*'"
    assert table["fc.bias"].spec == ("data",)


def test_stacked_layers_keep_their_axis_whole():
    rules = {pax.Linear: {"weight": P("data", "model"), "bias": P("model")}}
    stack = jax.eval_shape(lambda: T.Vmap(pax.Linear, axis_size=3)(8, 8))
    assert specs(stack, rules) == {
        "vmap_module.weight": (None, "data", "model"),
        "vmap_module.bias": (None, "model"),
    }
    axes = {"weight": 2, "bias": None}
    one = T.Vmap(lambda: pax.Linear(8, 8, b_init=jax.nn.initializers.zeros), axis_size=3,
                 state_axes=axes)  # fmt: skip
    assert specs(jax.eval_shape(one), rules) == {
        "vmap_module.weight": ("data", "model", None),
        "vmap_module.bias": ("model",),
    }
    nested = T.Vmap(T.Scan(pax.Linear, length=3, state_axes={...: -1}), axis_size=2)
    shapes = jax.eval_shape(lambda: nested(8, 8))
    assert specs(shapes, rules) == {
        "vmap_module.scan_module.weight": (None, "data", "model", None),
        "vmap_module.scan_module.bias": (None, "model", None),
    }


def test_any_tree_of_modules_and_arrays(block):
    tree = {"model": block, "more": [jax.numpy.ones((8, 8)), 3, jax.random.key(0)]}
    table = sharding.table(tree, MESH, {"model.fc.weight": P("data"), "more.0": P("model")})
    assert table["more.0"].spec == ("model",)
    assert table["more.1"].dtype == "int32" and table["more.1"].bytes == 4
    assert table["more.2"].bytes == 8
    assert "more.1" in table.unmatched


def test_text():
    rules = sharding.Rules.of({"a.*": P("data"), pax.Linear: P("model")})
    assert str(rules) == "'a.*' | Linear.weight"
    both = rules & sharding.fully_sharded() | sharding.data_parallel()
    assert str(both) == "'a.*' | Linear.weight & fully_sharded | data_parallel"
