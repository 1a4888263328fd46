"""A pretrained body is frozen, gets a new head, and is thawed again."""

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax


def make_net():
    return pax.Sequential(
        pax.Linear(4, 8, with_bias=False),
        pax.BatchNorm1D(8),
        jax.nn.relu,
        pax.Linear(8, 8),
        jnp.tanh,
        pax.Linear(8, 3),
    )


def loss_fn(net, x, y):
    net, out = pax.purecall(net, x)
    return jnp.mean(jnp.square(out - y)), net


@jax.jit
def step(net, optimizer, x, y):
    (loss, net), grads = pax.value_and_grad(loss_fn, has_aux=True)(net, x, y)
    params = net.parameters()
    optimizer, updates = pax.purecall(optimizer, grads, params)
    return net.update_parameters(params.map(jax.lax.sub, updates)), optimizer, loss


def train(name, net, x, y, steps=8):
    optimizer = opax.adam(1e-2).init(net.parameters())
    for i in range(steps):
        net, optimizer, loss = step(net, optimizer, x, y)
        print(name, i, float(loss))
    print(name, "trainable", sum(a.size for a in jax.tree_util.tree_leaves(net.parameters())))
    return net


class Finetune(pax.Module):
    def __init__(self, body, head):
        super().__init__()
        self.parts = {"body": body, "head": head}
        self.ups = [pax.Linear(8, 8), pax.Linear(8, 8)]

    def __call__(self, x):
        x = self.parts["body"].eval()(x)
        for up in self.ups:
            x = x + up(x)
        return self.parts["head"](x)


def main():
    pax.seed_rng_key(1)
    random = np.random.RandomState(0)
    x = random.randn(10, 2, 4).astype(np.float32)
    y = random.randn(10, 2, 3).astype(np.float32)

    net = train("whole", make_net(), x, y)
    original = net
    net = pax.freeze_parameters(net)
    net = net.set(-1, pax.Linear(8, 3))
    net = train("head", net, x, y)
    print(net.summary())

    net = net.replace_node(net[3], pax.freeze_parameters(pax.Linear(8, 8)))
    net = net.set(4, pax.Dropout(0.5)) >> pax.Identity() >> jnp.sin
    net = train("swapped", net, x, y, 4)

    thawed = pax.unfreeze_parameters(pax.freeze_parameters(original), origin=original)
    print("thawed", thawed == original, thawed.training)
    body = pax.freeze_parameters(pax.Sequential(*[thawed[i] for i in range(5)])).eval()
    model = train("parts", Finetune(body, pax.Linear(8, 3)), x, y)
    print(model.summary())
    model = pax.pure(lambda m: m.ups.pop() and m)(model)
    print(len(model.ups), float(loss_fn(model, x, y)[0]))


if __name__ == "__main__":
    main()
