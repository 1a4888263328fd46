"""Averages of weights and of statistics: EMA over a module, an array, a dict and counters."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class Model(pax.Module):
    def __init__(self):
        super().__init__()
        self.net = pax.Sequential(pax.Linear(3, 8), jax.nn.relu, pax.Linear(8, 1))
        self.activity = pax.EMA(jnp.zeros((8,)), 0.9, debias=True)
        self.stats = pax.EMA({"mean": jnp.zeros(()), "count": jnp.array(0)}, 0.8, allow_int=True)
        self.calls = jnp.array(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        hidden = jax.nn.relu(self.net[0](x))
        scale = 1.0 / (1.0 + self.activity(jnp.mean(hidden, axis=0)))
        self.stats({"mean": jnp.mean(x), "count": self.calls * 2})
        return self.net[2](hidden * scale)


def loss_fn(model, x, y):
    model, prediction = model % x
    return jnp.mean(jnp.square(prediction[:, 0] - y)), model


@jax.jit
def step(model, average, optimizer, x, y):
    (loss, model), grads = pax.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    model, optimizer = opax.apply_gradients(model, optimizer, grads)
    average, _ = average % model.parameters()
    return model, average, optimizer, loss


def main():
    pax.seed_rng_key(5)
    model = Model()
    print(model.summary())
    average = pax.EMA(model.parameters(), 0.9)
    optimizer = opax.rmsprop(1e-2)(model.parameters())
    random = np.random.RandomState(1)
    x = random.randn(16, 3).astype(np.float32)
    y = np.sin(x.sum(1))
    for i in range(22):
        model, average, optimizer, loss = step(model, average, optimizer, x, y)
        slow = model.update_parameters(average.averages)
        print("loss", i, float(loss), float(loss_fn(slow.eval(), x, y)[0]))
    print("stats", float(model.stats.averages["mean"]), int(model.stats.averages["count"]))
    print("activity", [float(a) for a in model.eval().activity(None)])
    print("debias", float(model.activity.debias), model.stats.debias)


if __name__ == "__main__":
    main()
