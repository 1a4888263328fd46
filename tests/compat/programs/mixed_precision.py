"""A convolution net in half precision, with a loss scale."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import opax
import pax
from pax.experimental import apply_scaled_gradients, default_mp_policy


def make_net():
    return pax.Sequential(
        pax.Conv2D(1, 8, 3, stride=2, name="conv"),
        pax.BatchNorm2D(8),
        jax.nn.relu,
        lambda x: jnp.mean(x, axis=(1, 2)),
        pax.Linear(8, 3),
    )


def loss_fn(params, net, loss_scale, x, y):
    net = net.update_parameters(params)
    net, logits = net % x
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    loss = -jnp.mean(jnp.sum(jax.nn.one_hot(y, 3) * logs, axis=-1))
    return loss_scale.scale(loss), (loss, net)


@jax.jit
def step(net, optimizer, loss_scale, x, y):
    grads, (loss, net) = jax.grad(loss_fn, has_aux=True)(~net, net, loss_scale, x, y)
    net, optimizer, loss_scale = apply_scaled_gradients(net, optimizer, loss_scale, grads)
    return net, optimizer, loss_scale, loss


def main():
    rng = np.random.RandomState(1)
    y = rng.randint(0, 3, (32,))
    x = rng.randn(32, 8, 8, 1).astype("float32") + y[:, None, None, None]
    pax.seed_rng_key(3)
    net = make_net().apply(default_mp_policy)
    print(net.summary())
    net = pax.Sequential(*[net[i] for i in range(5)])
    optimizer = opax.adam(3e-3)(net.parameters())
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**15))
    for i in range(20):
        net, optimizer, loss_scale, loss = step(net, optimizer, loss_scale, x, y)
        if i % 5 == 4:
            print("loss", i + 1, float(loss))
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    layer = pax.apply_mp_policy(pax.Linear(3, 3), mp_policy=policy)
    print(layer, layer(jnp.ones((2, 3))).dtype, pax.unwrap_mp_policy(layer))


if __name__ == "__main__":
    main()
