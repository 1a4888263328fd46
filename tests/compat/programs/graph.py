"""A residual net as a graph, a lazy module."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.experimental.graph import GraphModule, InputNode, Node, build_graph_module


def residual(x: Node, mask: Node):
    h = x >> pax.Linear(x.shape[-1], 8) >> jax.nn.relu
    h = (h & x) >> partial(jnp.concatenate, axis=-1)
    h = h >> pax.Linear(h.shape[-1], 4)
    y = (h | x) >> jax.lax.add
    return y.binary_ops(jnp.multiply, mask)


@dataclass
class Lazy(pax.experimental.LazyModule):
    features: list

    def __call__(self, x):
        for i, (a, b) in enumerate(zip(self.features[:-1], self.features[1:])):
            x = jax.nn.relu(self.get_or_create(f"fc_{i}", partial(pax.Linear, a, b))(x))
        return x


def main():
    pax.seed_rng_key(9)
    x = jnp.asarray(np.random.RandomState(4).randn(6, 4), jnp.float32)
    mask = jnp.asarray([[1.0], [0.0]] * 3)
    net = build_graph_module(residual)(x, mask)
    print(isinstance(net, GraphModule), len(net.submodules()))
    optimizer = opax.rmsprop(1e-2)(net.parameters())

    def loss_fn(net, x):
        loss = jnp.mean((net(x, mask) - jnp.cos(x)) ** 2)
        return loss, (loss, net)

    update = jax.jit(pax.build_update_fn(loss_fn))
    for i in range(5):
        net, optimizer, loss = update(net, optimizer, x)
        print("loss", i, float(loss))
    a = InputNode(x)
    one = GraphModule((a,), a >> pax.Linear(4, 2))
    print("one", 0, float(one(x).sum()))
    mlp, y = Lazy([4, 3, 2]) % x
    print("lazy", 0, float(y.sum()), mlp.summary())


if __name__ == "__main__":
    main()
