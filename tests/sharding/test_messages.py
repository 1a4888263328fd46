"""What is said where rules, specs, meshes and arrays do not fit."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export.errors import InvalidArgumentTypeError, ShardingError
from tests.refusals import refused

MESH = sharding.abstract_mesh(data=2, model=4)


def net():
    return pax.Sequential(pax.Linear(6, 8), jax.nn.relu, pax.Linear(8, 3))


def table(rules, mesh=MESH, tree=None):
    return sharding.table(net() if tree is None else tree, mesh, rules)


MISTAKES = [
    (lambda: table({"*.0.weight": P(None, "modle")}), "modules.0.weight",
     ["P(None, 'modle') of '*.0.weight'", "(6, 8)", "data=2, model=4"]),
    (lambda: table(None, tree=pax.Linear(2, 2).with_sharding(weight=("rows", None))), "weight",
     ["P('rows', None) of with_sharding"]),
    (lambda: table(sharding.fully_sharded("fsdp")), "fully_sharded", ["axis='fsdp'"]),
    (lambda: table({pax.Linear: P("model", None)}), "modules.0.weight",
     ["axis 0 is partitioned 4 times", "size is 6", "P('model', None) of Linear.weight"]),
    (lambda: table({"*.2.weight": P(None, ("data", "model"))}), "modules.2.weight",
     ["axis 1 is partitioned 8 times", "size is 3"]),
    (lambda: table({"*.0.kernel": P(None, "model")}), "'*.0.kernel'",
     ["leaves modules.0.weight", "pax.sharding.following(model, rules)"]),
    (lambda: table({pax.Embed: P("model")}), "Embed.weight", ["of Sequential, Linear"]),
    (lambda: table({pax.Linear: {"kernel": P("model")}}), "Linear.kernel",
     ["leaves modules.0.weight"]),
    (lambda: table(sharding.tensor_parallel(), tree={"w": jax.numpy.ones(4)}), "tensor_parallel",
     ["leaves w"]),
    (lambda: table({"*.weight": P(), "*.0.weight": P(None, "model")}), "'*.0.weight'",
     ["rules before it for modules.0.weight"]),
    (lambda: table({"*.0.*": P(None, "model")}), "modules.0.bias",
     ["2 entries for 1 axes", "'*.0.*'", "following(model, rules)"]),
    (lambda: table({"*.0.weight": P("data", ("model", "data"))}), "modules.0.weight",
     ["P('data', ('model', 'data'))", "duplicate"]),
    (lambda: sharding.make_mesh(data=3, devices=jax.devices()[:1]), None,
     ["data=3 for 1 devices", "make_mesh(data=-1, model=2)", "devices=jax.devices()[:n]"]),
    (lambda: sharding.abstract_mesh(data=-1), None,
     ["data=-1", "abstract_mesh(data=64, model=8)"]),
]  # fmt: skip


def looks_at_its_weight():
    layer = pax.Linear(2, 2)
    return layer if float(layer.weight.sum()) > 0 else pax.Identity()


def test_a_constructor_that_looks_at_values():
    mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
    with refused(ShardingError, "got: ", "pax.sharding.shard(constructor(), ...)"):
        sharding.init(looks_at_its_weight, mesh)


WRONG_TYPES = {
    "rules": lambda: table([("*", P())]),
    "key": lambda: table({int: P()}),
    "spec": lambda: table({"*": "model"}),
    "entry": lambda: table({"*": (0,)}),
    "mapping for a path": lambda: table({"*": {"weight": P()}}),
    "mesh": lambda: table(None, mesh=(2, 4)),
    "size of a mesh": lambda: sharding.make_mesh(data=2.0),
    "no devices": lambda: sharding.shard(net(), MESH),
    "no devices to build on": lambda: sharding.init(net, MESH),
    "no devices for a batch": lambda: sharding.shard_batch([1.0], MESH),
}


@pytest.mark.parametrize(("call", "where", "names"), MISTAKES)
def test_mistakes_are_refused(call, where, names):
    assert issubclass(ShardingError, ValueError)
    with refused(ShardingError, *names, **({"where": where} if where else {})):
        call()


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_types_are_refused(case):
    with refused(InvalidArgumentTypeError, "fix: ") as caught:
        WRONG_TYPES[case]()
    assert isinstance(caught.value, TypeError)
