"""What `test_processes.py` runs in two processes with two devices each, and in one with four.

Called as ``python -m tests.sharding.two_processes COUNT RANK ADDRESS``.
"""

from __future__ import annotations

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export.errors import ShardingError
from tests.closeness import assert_close

RULES = sharding.fully_sharded(min_size=16)


def make():
    net = pax.Sequential(pax.Linear(8, 16), jax.nn.relu, pax.Dropout(0.1), pax.Linear(16, 4))
    return {"net": net, "key": jax.random.key(3), "step": 7}


def is_key(leaf):
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)


def assert_trees_close(tree, expected):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        if is_key(x):
            x, y = jax.random.key_data(x).addressable_data(0), jax.random.key_data(y)
        assert_close(x, y, rtol=1e-6)


def placing(mesh):
    pax.seed_rng_key(5)
    expected = make()
    placed = sharding.shard(expected, mesh, RULES)
    weight = placed["net"][0].weight
    assert len(weight.addressable_shards) == 4 // jax.process_count()
    assert weight.addressable_data(0).shape == (8, 4)
    assert_trees_close(sharding.gather(placed, host=True), expected)
    assert sharding.gather(placed)["net"][0].weight.is_fully_replicated

    pax.seed_rng_key(5)
    built = sharding.init(make, mesh, RULES)
    assert built["net"][0].weight.sharding == weight.sharding
    assert_trees_close(sharding.gather(built, host=True), expected)

    other = sharding.make_mesh(rows=2, columns=2)
    moved = sharding.shard(placed["net"], other, {"*.0.weight": P("rows", "columns")})
    assert moved[0].weight.addressable_data(0).shape == (4, 8)
    return built["net"]


def training(net, mesh, rank):
    adam = pax.optim.from_optax(optax.adam(1e-2))
    rules = sharding.following(net, RULES)
    optimizer = sharding.init(lambda: adam(net.parameters()), mesh, rules)
    assert optimizer.state[0].mu[0].weight.sharding == net[0].weight.sharding
    again = sharding.shard(adam(net.parameters()), mesh, rules)
    assert again.state[0].count.is_fully_replicated

    def loss_fn(net, x):
        net, y = net % x
        loss = jnp.mean((y - x[:, :4]) ** 2)
        return loss, (loss, net)

    step = jax.jit(sharding.keep(pax.build_update_fn(loss_fn), net, optimizer))
    examples = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    own = np.split(examples, jax.process_count())[rank]
    batch = sharding.shard_batch(own, mesh)
    assert batch.shape == (8, 8)
    first = net[0].weight.sharding
    net, optimizer, _ = step(net, optimizer, batch)
    net, optimizer, loss = step(net, optimizer, batch)
    assert net[0].weight.sharding.is_equivalent_to(first, 2) and np.isfinite(loss)
    # Both processes stand at one place of an axis of size 1: the same examples.
    whole = sharding.make_mesh(data=1, model=4)
    assert sharding.shard_batch(np.ones((4, 2)), whole).shape == (4, 2)
    return sharding.gather({"net": net, "loss": loss}, host=True)


def digest(tree):
    """A hash of all bits of a tree."""
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)))


def disagreeing(mesh, rank):
    for place in (
        lambda: sharding.shard(make(), mesh, RULES),
        lambda: sharding.init(make, mesh, RULES),
    ):
        pax.seed_rng_key(rank)
        try:
            place()
        except ShardingError as error:
            assert "2 processes, of which only 0 agree" in str(error)
            assert "pax.seed_rng_key(n)" in str(error)
        else:
            raise AssertionError("two different models were placed as one")


def main(count: int, rank: int, address: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, rank)
    mesh = sharding.make_mesh(data=4)
    training(placing(mesh), mesh, rank)
    # A sum of two has one result; one of four depends on the order, which gloo chooses.
    pair = sharding.make_mesh(data=2, devices=jax.devices()[::2])
    trained = training(sharding.init(make, pair, RULES)["net"], pair, rank)
    if count > 1:
        disagreeing(mesh, rank)
    print("all is well:", digest(trained).hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
