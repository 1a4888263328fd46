"""A small training run, with everything that a checkpoint may hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import pax_export as pax


def make_model():
    return pax.Sequential(
        pax.Linear(4, 8), jax.nn.relu, pax.BatchNorm1D(8), pax.Dropout(0.2), pax.Linear(8, 2)
    )


def make_state():
    """All that a step of training takes and gives: with a legacy key in the dropout, a typed one
    beside, and a stream of keys."""
    model = make_model()
    return {
        "model": model,
        "optimizer": pax.optim.from_optax(optax.adam(1e-2))(model.parameters()),
        "loss_scale": pax.precision.DynamicLossScale(2.0**4, period=3),
        "rng": jax.random.key(7),
        "stream": pax.RngSeq(seed=3),
    }


def batch(step):
    x = jax.random.normal(jax.random.PRNGKey(step), (4, 4, 4))
    return x, jnp.stack([x[..., 0] * x[..., 1], x.sum(-1)], -1)


def loss_of(model, scale, x, y):
    model, prediction = model % x
    loss = jnp.mean(jnp.square(prediction - y))
    return scale.scale(loss), (loss, model)


@jax.jit
def train_step(state, x, y):
    rng, one = jax.random.split(state["rng"])
    stream, other = pax.module_and_value(type(state["stream"]).next_rng_key)(state["stream"])
    x = x + 0.1 * jax.random.normal(one, x.shape) + 0.1 * jax.random.normal(other, x.shape)
    grads, (loss, model) = pax.grad(loss_of, has_aux=True)(
        state["model"], state["loss_scale"], x, y
    )
    model, optimizer, scale = pax.optim.apply_scaled_gradients(
        model, state["optimizer"], state["loss_scale"], grads
    )
    new = {"model": model, "optimizer": optimizer, "loss_scale": scale, "rng": rng}
    return {**new, "stream": stream}, loss
