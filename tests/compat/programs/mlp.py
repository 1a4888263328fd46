"""A multilayer perceptron on made data, trained as PAX's first page shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class MLP(pax.Module):
    fc1: pax.Linear
    fc2: pax.Linear

    def __init__(self, dims, drop=0.1):
        super().__init__(name="mlp")
        self.fc1 = pax.Linear(dims[0], dims[1])
        self.norm = pax.LayerNorm(dims[1], -1, True, True)
        self.drop = pax.Dropout(drop)
        self.fc2 = pax.Linear(dims[1], dims[2])

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.fc1(x)))
        return self.fc2(self.drop(x))


def loss_fn(model: MLP, x, y):
    model, predicted = pax.module_and_value(model)(x)
    loss = jnp.mean(jnp.square(predicted - y))
    return loss, (loss, model)


def main():
    rng = np.random.RandomState(0)
    x = rng.randn(64, 4).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
    pax.seed_rng_key(7)
    model = MLP((4, 32, 1))
    optimizer = opax.chain(
        opax.clip_by_global_norm(1.0),
        opax.adam(opax.schedule.exponential_decay(1e-2, 20, 2.0, min_value=1e-3)),
    )(model.parameters())
    update = jax.jit(pax.utils.build_update_fn(loss_fn))
    for step in range(30):
        model, optimizer, loss = update(model, optimizer, x, y)
        if step % 5 == 4:
            print("loss", step + 1, float(loss))
    model = model.eval()
    print("eval", 0, float(loss_fn(model, x, y)[0]))
    print(model.summary())


if __name__ == "__main__":
    main()
