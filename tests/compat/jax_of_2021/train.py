"""A program as one wrote them in 2021: two small networks, by pax and by stax."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pax
from data.batches import batches
from jax import host_count, host_id, partial, tree_multimap
from jax.config import config
from jax.experimental import host_callback as hcb
from jax.experimental import optimizers, stax
from jax.interpreters.xla import DeviceArray
from jax.lib import xla_bridge
from jax.ops import index, index_add, index_update
from jax.tree_util import tree_multimap as tree_multimap_too
from metrics import accuracy

config.update("jax_debug_nans", False)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
FLAGS = parser.parse_args()


def with_pax(key: jax.random.KeyArray) -> DeviceArray:
    net = pax.Sequential(pax.Linear(4, 8), jax.nn.relu, pax.Linear(8, 2))

    def loss_fn(params, net, x, y):
        logits = net.update_parameters(params)(x)
        logits = jnp.clip(logits, a_min=-20.0, a_max=20.0)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * y, axis=-1))

    @partial(jax.jit, static_argnums=0)
    def step(rate, net, x, y):
        params = net.parameters()
        gradients = jax.grad(loss_fn)(params, net, x, y)
        gradients = jax.tree_map(lambda g: jnp.clip(a=g, a_min=-1, a_max=1), gradients)
        new = jax.tree_multimap(lambda p, g: p - rate * g, params, gradients)
        return net.update_parameters(new)

    for x, y in batches(key, FLAGS.steps):
        net = step(0.1, net, x, y)
    norms = tree_multimap(lambda p, q: jnp.sum(p * q), net.parameters(), net.parameters())
    assert jax.tree_leaves(norms)[0] > 0
    return accuracy(net(x), y)


def with_stax(key):
    init, apply = stax.serial(stax.Dense(8), stax.Relu, stax.Dense(2), stax.LogSoftmax)
    _, params = init(key, (-1, 4))
    opt_init, opt_update, get_params = optimizers.adam(1e-2)
    state = opt_init(params)

    def loss(params, x, y):
        return -jnp.mean(jnp.sum(apply(params, x) * y, axis=1))

    for i, (x, y) in enumerate(batches(key, FLAGS.steps)):
        state = opt_update(i, jax.grad(loss)(get_params(state), x, y), state)
    return accuracy(apply(get_params(state), x), y)


def on_devices(x):
    devices = jax.local_devices()
    everywhere = jax.device_put_replicated({"x": x}, devices)
    each = jax.pmap(lambda tree: tree["x"].sum())(everywhere)
    split = jax.device_put_sharded([x] * len(devices), devices)
    return each.shape == (len(devices),) and split.shape == (len(devices), *x.shape)


def main():
    key = jax.random.PRNGKey(0)
    print(with_pax(key) >= 0, with_stax(key) >= 0)
    x = jnp.arange(6.0).reshape(2, 3)
    x = index_update(x, index[0, 1:], 9.0)
    x = jax.ops.index_add(index_add(x, jax.ops.index[1], 1), (0, 0), -1)
    print(np.asarray(x).tolist())
    print(isinstance(x, jnp.DeviceArray), isinstance(x, DeviceArray))
    print(on_devices(x), host_id(), host_count(), xla_bridge.get_backend().platform)
    print(sorted(jax.random.shuffle(key, jnp.arange(4)).tolist()))
    print(jnp.alltrue(x > -2), jnp.product(jnp.array([2, 3])), jnp.in1d(jnp.array([1, 2]), [2]))
    print(jax.nn.normalize(jnp.array([1.0, 3.0])).round().tolist())
    print(jax.jit(lambda x: hcb.id_print(x, what="x") + 1)(jnp.float32(1)))
    print(jnp.quantile(jnp.array([1.0, 2.0]), 0.5, interpolation="nearest"))
    print("HloModule" in jax.xla_computation(jnp.sin)(1.0).as_hlo_text())
    print(tree_multimap_too(max, [1, 5], [3, 2]), jax.lax.tie_in(1, 2))
    print(jnp.reshape(jnp.arange(4), newshape=(2, 2)).shape, jnp.where(True, 1, 2))
    print(jax.remat(jnp.sin, concrete=True)(0.0))


main()
