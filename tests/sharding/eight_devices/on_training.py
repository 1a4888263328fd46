"""Training on a mesh: the numbers of one device, and everything stays where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export import opax, sharding
from pax_export import transforms as T
from pax_export.errors import PaxWarning, ShardingError
from tests.closeness import assert_close

BOTH = sharding.tensor_parallel() & sharding.fully_sharded(min_size=64)


class ConvNet(pax.Module):
    def __init__(self):
        super().__init__()
        self.conv = pax.Conv2D(3, 16, 3)
        self.norm = pax.BatchNorm2D(16)
        self.fc = pax.Linear(16, 8)

    def __call__(self, x):
        return self.fc(jax.nn.relu(self.norm(self.conv(x))).mean((1, 2)))


class Stack(pax.Module):
    def __init__(self):
        super().__init__()

        class Layer(pax.Sequential):
            def __call__(self, x):
                return super().__call__(x), None

        self.layers = T.Scan(Layer, length=2)(pax.Linear(16, 32), jax.nn.gelu, pax.Linear(32, 16))

    def __call__(self, x):
        return self.layers(x)[0]


def transformer():
    return pax.nets.Transformer(16, num_heads=4, num_layers=1, dropout_rate=0.1)


def dense():
    return pax.Sequential(pax.Linear(16, 32), jax.nn.relu, pax.Linear(32, 16))


CASES = {
    "transformer, both": (transformer, (8, 4, 16), "sgd", BOTH),
    "convolutions, both": (ConvNet, (8, 8, 8, 3), "sgd", BOTH),
    "scanned layers, both": (Stack, (8, 16), "sgd", BOTH),
    "dense layers, adafactor": (dense, (8, 16), "adafactor", BOTH),
    "dense layers, data parallel": (dense, (8, 16), "opax", sharding.data_parallel()),
}
OPTIMIZERS = {
    "sgd": lambda: pax.optim.from_optax(optax.sgd(1e-2, momentum=0.9)),
    "adafactor": lambda: pax.optim.from_optax(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "opax": lambda: opax.adam(1e-2),
}


def loss_fn(net, x):
    net, y = net % x
    loss = jnp.mean((y - 1) ** 2)
    return loss, (loss, net)


@pytest.mark.parametrize("case", CASES)
def test_a_step(case):
    make, shape, name, rules = CASES[case]
    mesh = sharding.make_mesh(data=2, model=4)
    net = make()
    optimizer = OPTIMIZERS[name]()(net.parameters())
    x = np.random.RandomState(0).standard_normal(shape).astype(np.float32)

    placed = sharding.shard(net, mesh, rules)
    state = sharding.shard(optimizer, mesh, sharding.following(net, rules))
    step = pax.build_update_fn(loss_fn)
    one, many = jax.jit(step), jax.jit(sharding.keep(step, placed, state))
    batch = sharding.shard_batch(x, mesh)
    now = placed, state
    for _ in range(2):
        net, optimizer, expected = one(net, optimizer, x)
        *now, loss = many(*now, batch)
        assert_close(loss, expected, rtol=1e-5)
    assert many._cache_size() == 1
    for before, after in zip(jax.tree.leaves((placed, state)), jax.tree.leaves(tuple(now))):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)


def test_kept_values_may_be_in_containers():
    mesh = sharding.make_mesh(data=8)
    rules = sharding.fully_sharded(min_size=1)
    net = sharding.shard(pax.Linear(8, 8), mesh, rules)

    def step(net):
        return {"nets": [net.map(jnp.sin)], "loss": net.weight.sum()}

    result = jax.jit(sharding.keep(step, net))(net)
    assert result["nets"][0].weight.sharding.is_equivalent_to(net.weight.sharding, 2)
    with pytest.raises(ShardingError):
        jax.jit(sharding.keep(lambda net: net.eval(), net))(net)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "legacy"])
def test_shards_drop_other_elements(key):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, spec = jax.sharding.Mesh(devices, ("rows", "columns")), jax.sharding.PartitionSpec
    layer, x = pax.Dropout(0.5).replace(rng_key=key), jnp.ones((8, 32))
    call = lambda layer, x: layer % x  # noqa: E731
    for sharded in (spec("rows"), spec("rows", "columns")):
        run = jax.jit(jax.shard_map(
            call, mesh=mesh, in_specs=(spec(), sharded), out_specs=(spec(), sharded)
        ))  # fmt: skip
        new, y = run(layer, x)
        assert not (y[:4] == y[4:]).all() and not (y[:, :16] == y[:, 16:]).all()
        assert (new.rng_key == (layer % x)[0].rng_key).all()  # and the key is of all shards
    with pytest.warns(PaxWarning, match="equal dropout masks"):
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(spec(), sharded),
            out_specs=(spec(), sharded),
            check_vma=False,
        )(layer, x)
