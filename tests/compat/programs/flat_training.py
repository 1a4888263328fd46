"""PAX's experimental tools in one loop: Flattener, LazyModule, mutable, weights as dicts."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.experimental import Flattener, LazyModule, mutable


@dataclass
class MLP(LazyModule):
    features: list

    def __call__(self, x):
        sizes = zip(self.features[:-1], self.features[1:])
        for i, (in_dim, out_dim) in enumerate(sizes):
            create_fn = partial(pax.Linear, in_dim, out_dim)
            x = jax.nn.leaky_relu(self.get_or_create(f"fc_{i}", create_fn)(x))
        return x


@pax.pure
def forward(net: LazyModule, x):
    fc1 = net.get_or_create("fc1", lambda: pax.Linear(2, 4))
    fc2 = net.get_or_create("fc2", lambda: pax.Linear(4, 3))
    return net, fc2(jax.nn.relu(fc1(x)))


def loss_fn(net, x, y):
    net, out = forward(net, x) if type(net) is LazyModule else net % x
    return jnp.mean(jnp.square(out - y)), net


@jax.jit
def step(flat, x, y):
    net, optimizer = flat.model, flat.optimizer
    (loss, net), grads = pax.value_and_grad(loss_fn, has_aux=True)(net, x, y)
    net, optimizer = opax.apply_gradients(net, optimizer, grads)
    return flat.update(model=net, optimizer=optimizer), loss


def train(name, net, x, y):
    flat = Flattener(model=net, optimizer=opax.adam(3e-2).init(net.parameters()))
    for i in range(10):
        flat, loss = step(flat, x, y)
        print(name, i, float(loss))
    return flat.model


def main():
    pax.seed_rng_key(42)
    x = np.random.RandomState(0).randn(8, 2).astype(np.float32)
    y = np.random.RandomState(1).randn(8, 3).astype(np.float32)

    net, _ = MLP([2, 4, 3]) % x
    net = train("mlp", net, x, y)
    print(net.summary())
    net, _ = forward(LazyModule(name="free"), x)
    net = train("free", net, x, y)
    print(net.summary())

    weights = pax.experimental.save_weights_to_dict(net)
    print(sorted(weights), sorted(weights["fc1"]))
    other, _ = forward(LazyModule(name="free"), x)
    print(other == net, pax.experimental.load_weights_from_dict(other, weights) == net)
    with mutable(net) as net:
        net.fc1.bias = net.fc1.bias * 0
        net.extra = jnp.array(1.0)
    print("changed", float(loss_fn(net, x, y)[0]), net.pytree_attributes)


if __name__ == "__main__":
    main()
