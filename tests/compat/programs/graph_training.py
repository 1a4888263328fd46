"""Models built as graphs, with dropout, batch norm and two inputs, then trained."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.experimental.graph import GraphModule, InputNode, Node, build_graph_module


def residual_net(x: Node):
    _, dim = x.shape
    y = x >> pax.Linear(dim, dim) >> jax.nn.relu >> pax.Linear(dim, dim) >> jnp.tanh
    z = (x | y) >> jax.lax.add
    return z >> pax.Linear(dim, 2)


def two_inputs(x: Node, y: Node):
    h = (x & y) >> partial(jnp.concatenate, axis=-1) >> pax.Linear(8, 4)
    return h >> pax.LayerNorm(4, -1, True, True) >> jax.nn.gelu >> pax.Linear(4, 2)


def loss_fn(net, inputs, target):
    net, out = pax.purecall(net, *inputs)
    return jnp.mean(jnp.square(out - target)), net


@jax.jit
def step(net, optimizer, inputs, target):
    (loss, net), grads = pax.value_and_grad(loss_fn, has_aux=True)(net, inputs, target)
    net, optimizer = opax.apply_gradients(net, optimizer, grads)
    return net, optimizer, loss


def train(name, net, inputs, target):
    optimizer = opax.adamw(2e-2).init(net.parameters())
    for i in range(7):
        net, optimizer, loss = step(net, optimizer, inputs, target)
        print(name, i, float(loss))
    return net


def main():
    pax.seed_rng_key(9)
    random = np.random.RandomState(0)
    x, y = random.randn(2, 6, 4).astype(np.float32)
    target = random.randn(6, 2).astype(np.float32)

    net = build_graph_module(residual_net)(x)
    print(net.summary())
    train("residual", net, (x,), target)
    train("two", build_graph_module(two_inputs)(x, y), (x, y), target)

    a, b = InputNode(x), InputNode(y)
    h = a >> pax.Linear(4, 4) >> jnp.sin
    out = h.binary_ops(jnp.multiply, b) >> pax.Linear(4, 2)
    net = GraphModule((a, b), out, name="product")
    print(net.summary())
    train("product", net, (x, y), target)
    print([type(m).__name__ for m in net.modules], out.shape, out.dtype)
    print(len(out.parents), len((a & b & h).parents))


if __name__ == "__main__":
    main()
