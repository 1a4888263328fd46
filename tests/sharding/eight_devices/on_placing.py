"""shard, gather, init and shard_batch: what lies where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export.sharding._shard import program_of
from tests.closeness import assert_close
from tests.own_layers import rows

RULES = sharding.tensor_parallel() & sharding.fully_sharded(min_size=64)


@pytest.fixture(scope="module")
def mesh():
    assert len(jax.devices()) == 8
    return sharding.make_mesh(data=2, model=-1)


def transformer():
    return pax.nets.Transformer(16, num_heads=4, num_layers=1, dropout_rate=0.1)


def assert_lies_as_planned(tree, mesh, rules):
    for leaf, row in zip(jax.tree.leaves(tree), sharding.table(tree, mesh, rules)):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(*row.spec)), leaf.ndim)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {row.shard_shape}
        assert all(shard.data.nbytes == row.bytes_per_device for shard in leaf.addressable_shards)


def assert_same_values(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_shard_and_gather(mesh):
    net = transformer()
    placed = sharding.shard(net, mesh, RULES)
    assert_lies_as_planned(placed, mesh, RULES)
    assert jax.tree.structure(placed) == jax.tree.structure(net)
    assert_same_values(placed, net)
    whole = sharding.gather(placed)
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(whole))
    assert_same_values(whole, net)
    host = sharding.gather(placed, host=True)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(host))
    assert_same_values(host, net)
    assert_same_values(sharding.shard(host, mesh, RULES), net)


def test_keys_and_numbers_are_placed_too(mesh):
    tree = {"key": jax.random.key(3), "step": 7, "rows": np.arange(8.0)}
    placed = sharding.shard(tree, mesh, {"rows": P("model")})
    assert placed["key"].is_fully_replicated and len(placed["key"].devices()) == 8
    assert placed["step"].dtype == jnp.int32 and not placed["step"].weak_type
    assert placed["rows"].dtype == jnp.float32
    back = sharding.gather(placed, host=True)
    assert jnp.issubdtype(back["key"].dtype, jax.dtypes.prng_key) and back["step"] == 7


@pytest.mark.parametrize("name", ["Bilinear", "LowRank", "MaskedConv"])
@pytest.mark.parametrize("rules", [sharding.tensor_parallel(), sharding.fully_sharded(min_size=1)])
def test_a_layer_of_a_user(name, rules, mesh):
    layer, x = rows()[name]
    placed = sharding.shard(layer, mesh, rules)
    assert_lies_as_planned(placed, mesh, rules)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(placed))
    slope = jax.jit(jax.grad(lambda layer: (layer(x) ** 2).sum(), allow_int=True))
    assert_close(jax.jit(lambda layer: layer(x))(placed), layer(x))
    for one, other in zip(jax.tree.leaves(slope(placed)), jax.tree.leaves(slope(layer))):
        assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_another_mesh(mesh):
    net = pax.Linear(16, 32)
    placed = sharding.shard(net, mesh, {"weight": P("data", "model")})
    other = sharding.make_mesh(model=4, devices=jax.devices()[:4])
    moved = sharding.shard(placed, other, {"weight": P(None, "model")})
    assert moved.weight.sharding == NamedSharding(other, P(None, "model"))
    assert_same_values(moved, net)


def test_abstract_modules_get_shardings(mesh):
    abstract = jax.eval_shape(transformer)
    for where in (mesh.abstract_mesh, mesh):
        placed = sharding.shard(abstract, where, RULES)
        weight = placed.layers[0]["dense_block"].fc1.weight
        assert weight.sharding == NamedSharding(where, P("data", "model"))
    compiled = jax.jit(lambda net: net.map(jnp.sin)).lower(placed).compile()
    (shardings,), _ = compiled.input_shardings
    assert shardings.layers[0]["dense_block"].fc1.weight == weight.sharding


def test_inside_jit_it_is_a_constraint(mesh):
    net = pax.Linear(16, 32)
    rules = {"weight": P("data", "model")}
    placed = jax.jit(lambda net: sharding.shard(net.map(jnp.sin), mesh, rules))(net)
    assert placed.weight.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_init_gives_what_the_constructor_gives(mesh):
    pax.seed_rng_key(1)
    expected, next_key = transformer(), pax.next_rng_key()
    pax.seed_rng_key(1)
    calls = []
    net = sharding.init(lambda: calls.append(0) or transformer(), mesh, RULES)
    assert len(calls) == 1
    np.testing.assert_array_equal(pax.next_rng_key(), next_key)
    assert jax.tree.structure(net) == jax.tree.structure(expected)
    assert_lies_as_planned(net, mesh, RULES)
    for x, y in zip(jax.tree.leaves(net), jax.tree.leaves(expected)):
        assert_close(x, y, rtol=1e-6)


def test_two_models_of_one_constructor_differ(mesh):
    nets = [sharding.init(make, mesh) for make in [lambda: pax.Linear(4, 4)] * 2]
    assert (nets[0].weight != nets[1].weight).all()


def test_init_makes_no_whole_leaf(mesh):
    """Neither the result nor anything in between is as large as the model's largest leaf."""
    rules = sharding.fully_sharded(("data", "model"))
    compiled = program_of(lambda: pax.Linear(1024, 2048), mesh, rules).lowered().compile()
    memory = compiled.memory_analysis()
    whole = 1024 * 2048 * 4
    assert memory.output_size_in_bytes <= whole / 8 + 2 * 2048
    assert memory.temp_size_in_bytes < whole / 2
    shapes = {shape for line in compiled.as_text().splitlines() for shape in line.split()}
    assert not any("[1024,2048]" in shape for shape in shapes)
    replicated = program_of(lambda: pax.Linear(1024, 2048), mesh, None).lowered().compile()
    assert replicated.memory_analysis().output_size_in_bytes >= whole
    assert "[1024,2048]" in replicated.as_text()


def test_init_takes_arrays_from_outside_without_copying_them_into_the_program(mesh):
    table = sharding.shard(jnp.arange(1024.0), mesh, {"": P("data")})
    made = sharding.init(lambda: {"twice": 2 * table}, mesh, {"twice": P("data")})
    np.testing.assert_array_equal(made["twice"], 2 * np.arange(1024))
    program = program_of(lambda: {"twice": 2 * table}, mesh, None)
    assert program.constants[0] is table
    assert "1023" not in program.lowered().as_text()


def test_a_batch(mesh):
    batch = {"x": np.ones((8, 3)), "y": jnp.arange(8)}
    placed = sharding.shard_batch(batch, mesh)
    assert placed["x"].sharding.shard_shape((8, 3)) == (4, 3)
    np.testing.assert_array_equal(placed["y"], np.arange(8))
    both = sharding.shard_batch(batch, mesh, ("data", "model"))
    assert both["x"].sharding.shard_shape((8, 3)) == (1, 3)


def test_a_batch_that_cannot_be_split(mesh):
    for batch in (np.ones((7, 3)), {"x": np.ones((8, 3)), "n": 3.0}):
        with pytest.raises(ValueError, match="(?i)sharding"):  # of jax
            sharding.shard_batch(batch, mesh, "data")
    with pytest.raises(ValueError, match="rows"):
        sharding.shard_batch(np.ones((8, 3)), mesh, "rows")


def test_optimizer_state_follows_its_parameters(mesh):
    net = sharding.shard(transformer(), mesh, RULES)
    rules = sharding.following(net, RULES)
    adam = pax.optim.from_optax(optax.adamw(1e-3))
    for optimizer in (
        sharding.shard(adam(sharding.gather(net).parameters()), mesh, rules),
        sharding.init(lambda: adam(net.parameters()), mesh, rules),
    ):
        for moment in (optimizer.state[0].mu, optimizer.state[0].nu):
            for a, b in zip(jax.tree.leaves(moment), jax.tree.leaves(net.parameters())):
                assert a.sharding == b.sharding
        assert optimizer.state[0].count.is_fully_replicated


def test_new_layers_have_the_sharding_of_jax():
    def devices(net):
        return {device for leaf in jax.tree.leaves(net) for device in leaf.devices()}

    second = jax.devices()[1]
    with jax.default_device(second):
        layers = [pax.Linear(2, 3), pax.LayerNorm(3), pax.BatchNorm1D(3)]
    assert devices(layers) == {second}
    key = jax.device_put(jax.random.key(0), second)
    assert devices(pax.Linear(2, 3, rng_key=key)) == {second}
    assert devices(pax.Linear(2, 3)) == {jax.devices()[0]}
