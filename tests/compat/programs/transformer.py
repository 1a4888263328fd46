"""A Transformer with dropout: gradients averaged over devices, optimizer called by hand."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from pax.nets import Transformer


def positional_encoding(x):
    _, length, dim = x.shape
    position = jnp.arange(0, length, dtype=x.dtype)[:, None]
    rate = jnp.exp(jnp.arange(0, dim, 2, dtype=x.dtype) * (-math.log(10_000.0) / dim))
    waves = (jnp.sin(position * rate[None, :]), jnp.cos(position * rate[None, :]))
    return x + jnp.concatenate(waves, axis=-1)[None, :, :]


class LM(pax.Module):
    transformer: Transformer

    def __init__(self, vocab_size: int, dim: int, num_layers: int, dropout: float):
        super().__init__()
        self.vocab_size = vocab_size
        w_init = jax.nn.initializers.variance_scaling(1.0, mode="fan_out", distribution="normal")
        self.embed = pax.Embed(vocab_size, dim, w_init=w_init)
        self.transformer = Transformer(dim, 2, num_layers, dropout_rate=dropout)
        self.output = pax.Linear(dim, vocab_size)

    def __call__(self, x, mask=None):
        return self.output(self.transformer(positional_encoding(self.embed(x)), mask))


def loss_fn(model: LM, batch):
    inputs, targets = batch[:, :-1], batch[:, 1:]
    mask = inputs != 0
    model, logits = pax.purecall(model, inputs, mask)
    targets = jax.nn.one_hot(targets, num_classes=model.vocab_size)
    logs = jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    return -jnp.sum(logs * mask) / jnp.sum(mask), model


def update_step(model_and_optimizer, batch):
    model, optimizer = model_and_optimizer
    (loss, model), grads = pax.value_and_grad(loss_fn, has_aux=True)(model, batch)
    grads = jax.lax.pmean(grads, axis_name="i")
    params = model.parameters()
    optimizer, updates = pax.purecall(optimizer, grads, params)
    model = model.update_parameters(params.map(jax.lax.sub, updates))
    return (model, optimizer), loss


@partial(jax.pmap, axis_name="i")
def update_fn(model, optimizer, multi_batch):
    (model, optimizer), losses = pax.scan(update_step, (model, optimizer), multi_batch)
    return model, optimizer, losses


def main():
    pax.seed_rng_key(42)
    net = LM(vocab_size=16, dim=8, num_layers=1, dropout=0.1)
    print(net.summary())
    optimizer = opax.chain(opax.clip_by_global_norm(1.0), opax.adam(1e-2)).init(net.parameters())
    tokens = (np.arange(9)[None] * np.arange(1, 7)[:, None] + 1) % 16
    batch = jnp.asarray(np.stack([tokens] * 10)[None])
    net, optimizer = jax.tree_util.tree_map(lambda x: x[None], (net, optimizer))
    for _ in range(3):
        net, optimizer, losses = update_fn(net, optimizer, batch)
        print("losses", [float(x) for x in losses[0]])
    net = jax.tree_util.tree_map(lambda x: x[0], net)
    print("eval", float(loss_fn(net.eval(), tokens)[0]))


if __name__ == "__main__":
    main()
