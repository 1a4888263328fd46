"""Modules that change: pure, purecall, module_and_value, mutable, parameters by name."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pax
from pax.utils import grad, scan


class Counter(pax.StateModule):
    def __init__(self):
        super().__init__()
        self.count = jnp.array(0)

    @partial(pax.pure)
    def twice(self):
        self.step()
        self.step()
        return self

    def step(self):
        self.count = self.count + 1
        return self.count


class Scaled(pax.Module):
    parameters = pax.parameters_method("scale")

    def __init__(self, dim):
        super().__init__()
        self.scale = jnp.ones((dim,))
        self.fixed = jnp.full((dim,), 2.0)
        self.layers = [pax.Linear(dim, dim), jnp.tanh]
        self.rng = pax.RngSeq(seed=5)

    def __call__(self, x):
        noise = jax.random.normal(self.rng.next_rng_key(), x.shape)
        for layer in self.layers:
            x = layer(x)
        return (x + 0.1 * noise) * self.scale * self.fixed


@dataclass
class Pair(pax.Module):
    left: pax.Linear
    right: pax.Linear
    name: str = "pair"

    def __call__(self, x):
        return self.left(x) - self.right(x)


def main():
    counter = Counter().twice()
    counter, value = pax.module_and_value(counter.step)()
    print("count", 0, float(counter.count), float(value))
    try:
        counter.count = jnp.array(0)
    except ValueError:
        print("immutable")

    pax.seed_rng_key(11)
    model = Scaled(3)
    x = np.random.RandomState(2).randn(6, 3).astype("float32")

    @jax.jit
    def step(model):
        def loss_fn(model):
            model, y = pax.purecall(model, x)
            return jnp.mean(y**2), model

        grads, model = grad(loss_fn, has_aux=True)(model)
        params = jax.tree_util.tree_map(lambda p, g: p - 0.5 * g, ~model, grads)
        return model.update_parameters(params), loss_fn(model)[0]

    for i in range(5):
        model, loss = step(model)
        print("loss", i, float(loss))
    print(model.parameters().fixed, model.pytree_attributes)

    gru = pax.GRU(3, 4)
    state, ys = scan(gru, gru.initial_state(2), jnp.ones((2, 7, 3)), time_major=False)
    print("gru", 0, float(ys.sum()), ys.shape, type(state).__name__)

    pair = Pair(pax.Linear(3, 2), pax.Linear(3, 2))
    with pax.experimental.mutable(pair) as pair:
        pair.left = pair.left.replace(bias=jnp.zeros(2))
    frozen = pax.freeze_parameters(pair)
    print("pair", 0, float(pair(x).sum()), frozen.parameters().left.bias, pair.name)
    print(pax.unfreeze_parameters(frozen, origin=pair) == pair, pair.summary())


if __name__ == "__main__":
    main()
