"""A user's layer gets from its declaration what layers of the library get."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.precision import policy_of
from tests.closeness import assert_close
from tests.own_layers import rows

ROWS = pytest.mark.parametrize("name", ["Bilinear", "LowRank", "MaskedConv"])


@ROWS
def test_new_initial_values(name):
    layer, x = rows()[name]
    new = layer.at(list(dict(layer.arrays))).init(jax.random.key(1))
    for own in layer.arrays:
        assert getattr(new, own).shape == getattr(layer, own).shape
    assert not np.allclose(new(x), layer(x))


@ROWS
@pytest.mark.parametrize("dora", [False, True])
def test_adapters(name, dora, tmp_path):
    layer, x = rows()[name]
    net = pax.Sequential(pax.Identity(), layer).eval()
    adapted = pax.adapters.add(net, "modules.1", rank=2, dora=dora)
    assert_close(adapted(x), net(x))
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(adapted.parameters())

    def loss_fn(net, x):
        net, y = net % x
        loss = (y - 1).var()
        return loss, (loss, net)

    step = jax.jit(pax.build_update_fn(loss_fn))
    losses = []
    for _ in range(5):
        adapted, optimizer, loss = step(adapted, optimizer, x)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    merged = pax.adapters.merge(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(net)
    assert not np.allclose(merged(x), net(x), atol=1e-4)
    assert_close(merged(x), adapted(x), atol=1e-4)
    pax.adapters.save(adapted, tmp_path / "adapters")
    loaded = pax.adapters.load(net, tmp_path / "adapters")
    assert_close(loaded(x), adapted(x))


@ROWS
def test_the_default_policy(name):
    layer, _ = rows()[name]
    policy = policy_of(pax.experimental.default_mp_policy(layer))
    assert policy == jmp.Policy(jnp.float32, jmp.half_dtype(), jnp.float32)


@ROWS
def test_tensor_parallel_and_fully_sharded_know_every_kernel(name):
    layer, _ = rows()[name]
    mesh = pax.sharding.abstract_mesh(model=4)
    table = pax.sharding.table(layer, mesh, pax.sharding.tensor_parallel())
    kernels = [own for own, each in layer.arrays.items() if "out" in each.axes]
    for own in kernels:
        array = getattr(layer, own)
        assert table[own].shard_shape == (*array.shape[:-1], array.shape[-1] // 4)
    assert not {*layer.arrays} & set(table.unmatched)
