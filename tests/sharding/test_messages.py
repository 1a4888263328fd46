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


MESSAGES = {
    "an axis that does not exist": (
        lambda: table({"*.0.weight": P(None, "modle")}),
        "The mesh has no axis 'modle'.\n"
        "  where: modules.0.weight\n"
        "  got: P(None, 'modle') of '*.0.weight' for shape (6, 8), on a mesh with data=2, model=4\n"
        "  write: 'model', or a mesh with an axis 'modle'",
    ),
    "a declared axis that does not exist": (
        lambda: table(None, tree=pax.Linear(2, 2).with_sharding(weight=("rows", None))),
        "The mesh has no axis 'rows'.\n"
        "  where: weight\n"
        "  got: P('rows', None) of with_sharding for shape (2, 2), "
        "on a mesh with data=2, model=4\n"
        "  write: 'data', or a mesh with an axis 'rows'",
    ),
    "an axis of ready-made rules": (
        lambda: table(sharding.fully_sharded("fsdp")),
        "The mesh has no axis 'fsdp'.\n"
        "  where: fully_sharded\n"
        "  got: axis='fsdp', on a mesh with data=2, model=4\n"
        "  write: 'data', or a mesh with an axis 'fsdp'",
    ),
    "a size that does not divide": (
        lambda: table({pax.Linear: P("model", None)}),
        "A mesh axis must divide the axis of the array that it splits.\n"
        "  where: modules.0.weight\n"
        "  got: size 6 of axis 0 by model=4: P('model', None) of Linear.weight for shape (6, 8)\n"
        "  write: a size that is a multiple of 4, or None for axis 0",
    ),
    "two axes that together do not divide": (
        lambda: table({"*.2.weight": P(None, ("data", "model"))}),
        "A mesh axis must divide the axis of the array that it splits.\n"
        "  where: modules.2.weight\n"
        "  got: size 3 of axis 1 by data=2, model=4 (together 8): "
        "P(None, ('data', 'model')) of '*.2.weight' for shape (8, 3)\n"
        "  write: a size that is a multiple of 8, or None for axis 1",
    ),
    "a path of no leaf": (
        lambda: table({"*.0.kernel": P(None, "model")}),
        "A rule matches no leaf.\n"
        "  where: '*.0.kernel'\n"
        "  got: 4 leaves, such as modules.0.weight\n"
        "  write: a pattern of the whole path ('*.weight'), or of paths in the model and then "
        "pax.sharding.following(model, rules) for what belongs to it",
    ),
    "a class of no leaf": (
        lambda: table({pax.Embed: P("model")}),
        "A rule matches no leaf.\n"
        "  where: Embed.weight\n"
        "  got: modules of Sequential, Linear\n"
        "  write: a class of which there are modules",
    ),
    "a class without such a leaf": (
        lambda: table({pax.Linear: {"kernel": P("model")}}),
        "A rule matches no leaf.\n"
        "  where: Linear.kernel\n"
        "  got: the leaves weight, bias\n"
        "  write: {Linear: {'weight': P(...)}}",
    ),
    "ready-made rules without a layer of theirs": (
        lambda: table(sharding.tensor_parallel(), tree={"w": jax.numpy.ones(4)}),
        "A rule matches no leaf.\n"
        "  where: tensor_parallel\n"
        "  got: 1 leaves\n"
        "  write: {MyLayer: {'weight': P(None, 'model')}}",
    ),
    "a rule that comes too late": (
        lambda: table({"*.weight": P(), "*.0.weight": P(None, "model")}),
        "A rule has no effect: earlier rules match all its leaves, and the first one counts.\n"
        "  where: '*.0.weight'\n"
        "  got: '*.weight' for modules.0.weight\n"
        "  write: '*.0.weight' before it",
    ),
    "a spec longer than the rank": (
        lambda: table({"*.0.*": P(None, "model")}),
        "A partition spec has at most one entry for each axis of the array.\n"
        "  where: modules.0.bias\n"
        "  got: 2 entries for 1 axes: P(None, 'model') of '*.0.*' for shape (8,)\n"
        "  write: a spec of its rank; for the state of an optimizer, "
        "rules=pax.sharding.following(model, rules)",
    ),
    "an axis used twice": (
        lambda: table({"*.0.weight": P("data", ("model", "data"))}),
        "A mesh axis can split only one axis of an array.\n"
        "  where: modules.0.weight\n"
        "  got: 'data' twice in P('data', ('model', 'data')) of '*.0.weight' for shape (6, 8)\n"
        "  write: another mesh axis, or None, in one of the two places",
    ),
    "devices": (
        lambda: sharding.make_mesh(data=3, devices=jax.devices()[:1]),
        "The sizes of the axes must multiply to the number of devices.\n"
        "  got: data=3 for 1 devices\n"
        "  write: make_mesh(data=-1, model=2), where -1 means the remaining devices, or "
        "devices=jax.devices()[:n] for some of them",
    ),
    "an abstract mesh without a size": (
        lambda: sharding.abstract_mesh(data=-1),
        "An abstract mesh needs the size of each axis, at least one.\n"
        "  got: data=-1\n"
        "  write: abstract_mesh(data=64, model=8)",
    ),
}


def looks_at_its_weight():
    layer = pax.Linear(2, 2)
    return layer if float(layer.weight.sum()) > 0 else pax.Identity()


def test_a_constructor_that_looks_at_values():
    mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
    with refused(ShardingError, "got: ", "pax.sharding.shard(constructor(), ...)"):
        sharding.init(looks_at_its_weight, mesh)


@pytest.mark.parametrize(
    ("given", "got", "write"),
    [
        ({"rows": 1, "columns": -1}, "dict for the devices: {'rows': 1, 'columns': -1}",
         "make_mesh(rows=1, columns=-1)"),
        ({}, "dict for the devices: {}", "make_mesh(data=4, model=2)"),
        (8, "int for the devices: 8", "make_mesh(data=4, model=2)"),
        ((4, 2), "tuple for the devices: (4, 2)", "make_mesh(data=4, model=2)"),
        ([("data", 1)], "list for the devices: [('data', 1)]", "make_mesh(data=4, model=2)"),
        ("data", "str for the devices: 'data'", "make_mesh(data=4, model=2)"),
    ],
)  # fmt: skip
def test_axes_where_devices_are_expected(given, got, write):
    with refused(InvalidArgumentTypeError, write, got=got):
        sharding.make_mesh(given)


WRONG_TYPES = {
    "rules": lambda: table([("*", P())]),
    "key": lambda: table({int: P()}),
    "spec": lambda: table({"*": "model"}),
    "entry": lambda: table({"*": (0,)}),
    "mapping for a path": lambda: table({"*": {"weight": P()}}),
    "mesh": lambda: table(None, mesh=(2, 4)),
    "axis": lambda: sharding.fully_sharded(0),
    "no axis": lambda: sharding.tensor_parallel(()),
    "size": lambda: sharding.fully_sharded(min_size="large"),
    "size of a mesh": lambda: sharding.make_mesh(data=2.0),
    "no devices": lambda: sharding.shard(net(), MESH),
    "no devices to build on": lambda: sharding.init(net, MESH),
    "no devices for a batch": lambda: sharding.shard_batch([1.0], MESH),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    call, message = MESSAGES[case]
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_type(case):
    with pytest.raises(InvalidArgumentTypeError) as caught:
        WRONG_TYPES[case]()
    assert isinstance(caught.value, TypeError) and caught.value.write
