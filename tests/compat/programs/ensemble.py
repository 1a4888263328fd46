"""Several models at once: made and trained in vmap, averaged, chosen with where."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


class Net(pax.Module):
    def __init__(self, key):
        super().__init__()
        key1, key2 = jax.random.split(key)
        self.fc1 = pax.Linear(2, 8, rng_key=key1)
        self.norm = pax.LayerNorm(8, -1, True, True)
        self.noise = pax.RngSeq(rng_key=key2)
        self.fc2 = pax.Linear(8, 1, rng_key=key2)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.fc1(x)))
        if self.training:
            x = x + 0.1 * jax.random.normal(self.noise.next_rng_key(), x.shape)
        return self.fc2(x)[:, 0]


def loss_fn(net, x, y):
    net, out = pax.purecall(net, x)
    return jnp.mean(jnp.square(out - y)), net


def step(net, optimizer, x, y):
    (loss, net), grads = pax.value_and_grad(loss_fn, has_aux=True)(net, x, y)
    net, optimizer = opax.apply_gradients(net, optimizer, grads)
    return net, optimizer, loss


def main():
    pax.seed_rng_key(0)
    keys = jax.random.split(pax.next_rng_key(), 3)
    nets = jax.vmap(Net)(keys)
    optimizers = jax.vmap(lambda net: opax.adam(3e-2).init(net.parameters()))(nets)
    print(nets.fc1.weight.shape, nets.summary())
    random = np.random.RandomState(0)
    x = random.randn(3, 16, 2).astype(np.float32)
    y = (x[..., 0] * x[..., 1]).astype(np.float32)
    steps = jax.jit(jax.vmap(step))
    for i in range(20):
        nets, optimizers, losses = steps(nets, optimizers, x, y)
        print("losses", i, [float(loss) for loss in losses])
    best = jnp.argmin(losses)
    net = jax.tree_util.tree_map(lambda a: a[best], nets)
    print("best", float(loss_fn(net.eval(), x[0], y[0])[0]))
    mean = jax.tree_util.tree_map(lambda a: jnp.mean(a, axis=0), nets.parameters())
    net = net.update_parameters(mean)
    print("mean", float(loss_fn(net.eval(), x[0], y[0])[0]))
    grads = jax.vmap(pax.grad(lambda n, a, b: loss_fn(n, a[None], b[None])[0]), (None, 0, 0))
    per_example = grads(net.eval(), x[0], y[0])
    print("norms", [float(n) for n in jnp.linalg.norm(per_example.fc2.weight[..., 0], axis=1)[:4]])


if __name__ == "__main__":
    main()
