"""Half precision: policies by class, three kinds of loss scale, steps that are skipped."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import opax
import pax
from pax.experimental import apply_scaled_gradients, default_mp_policy


class UNet(pax.Module):
    def __init__(self):
        super().__init__()
        self.down = pax.Sequential(
            pax.Conv2D(1, 4, 3, 2, with_bias=False), pax.BatchNorm2D(4), jax.nn.relu
        )
        self.middle = [pax.Conv2D(4, 4, 3), pax.GroupNorm(2, 4)]
        self.up = pax.Conv2DTranspose(4, 4, 2, 2)
        self.last = pax.Sequential(pax.LayerNorm(4, -1, True, True), pax.Linear(4, 1))

    def __call__(self, x):
        x = self.down(x)
        conv, norm = self.middle
        x = jax.nn.relu(norm(conv(x)))
        return self.last(self.up(x))[..., 0]


def policy(mod):
    half, full = jmp.half_dtype(), jnp.float32
    if isinstance(mod, pax.Conv2D):
        return pax.apply_mp_policy(
            mod, mp_policy=jmp.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)
        )
    if isinstance(mod, (pax.BatchNorm2D, pax.GroupNorm)):
        return pax.apply_mp_policy(
            mod, mp_policy=jmp.Policy(compute_dtype=full, param_dtype=full, output_dtype=full)
        )
    return mod


def loss_fn(model, batch, loss_scale):
    x, y = batch
    model, out = pax.module_and_value(model)(x)
    loss = jnp.mean(jnp.square(out - y))
    return loss_scale.scale(loss), (loss, model)


@jax.jit
def update_fn(model, optimizer, loss_scale, batch):
    grads, (loss, model) = pax.grad(loss_fn, has_aux=True)(model, batch, loss_scale=loss_scale)
    return (*apply_scaled_gradients(model, optimizer, loss_scale, grads), loss)


@jax.jit
def update_by_hand(model, optimizer, loss_scale, batch):
    grads, (loss, model) = pax.grad(loss_fn, has_aux=True)(model, batch, loss_scale)
    grads = loss_scale.unscale(grads)
    finite = jmp.all_finite(grads)
    loss_scale = loss_scale.adjust(finite)
    model, optimizer = opax.apply_gradients(model, optimizer, grads=grads, all_finite=finite)
    return model, optimizer, loss_scale, loss


def train(name, net, loss_scale, update):
    print(str(net.summary()).splitlines()[-1])
    optimizer = opax.chain(opax.clip_by_global_norm(1.0), opax.adam(1e-3))(net.parameters())
    for i in range(8):
        random = np.random.RandomState(i)
        x = random.randn(2, 8, 8, 1).astype(np.float32)
        net, optimizer, loss_scale, loss = update(
            net, optimizer, loss_scale, (x, np.sin(x[..., 0]))
        )
        print(name, i, float(loss), float(getattr(loss_scale, "loss_scale", 1)))
    return net


def main():
    pax.seed_rng_key(2)
    scale = jmp.DynamicLossScale(jnp.array(2.0**12), period=3)
    train("default", UNet().apply(default_mp_policy), scale, update_fn)
    train("by hand", UNet().apply(policy), scale, update_by_hand)
    train("static", UNet(), jmp.StaticLossScale(jnp.array(64.0)), update_fn)
    fc = pax.apply_mp_policy(pax.Linear(2, 3), jmp.get_policy("p=f16,c=f32,o=f32"))
    print(fc, fc.weight.dtype, pax.unwrap_mp_policy(fc), fc(jnp.ones((1, 2))).dtype)


if __name__ == "__main__":
    main()
