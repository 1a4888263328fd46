"""Agreement with flax nnx, on copied weights; runs where flax is installed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.transforms.models import batch

nnx = pytest.importorskip("flax.nnx")

D, N = 4, 3


class Ours(pax.Module):
    def __init__(self):
        super().__init__()
        self.linear = pax.Linear(D, D)
        self.bn = pax.BatchNorm1D(D)

    def __call__(self, x):
        return jax.nn.gelu(self.bn(self.linear(x)[None])[0])


class Theirs(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.bn = nnx.BatchNorm(D, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return jax.nn.gelu(self.bn(self.linear(x)))


def copied(ours, theirs):
    """Their module with our weights."""
    linear, bn = ours.linear, ours.bn
    channels = (*linear.bias.shape[:-1], D)
    theirs.linear.kernel.set_value(linear.weight)
    theirs.linear.bias.set_value(linear.bias)
    theirs.bn.scale.set_value(bn.scale.reshape(channels))
    theirs.bn.bias.set_value(bn.offset.reshape(channels))
    return theirs


def build_many():
    ours = T.vmap(Ours, axis_size=N)()

    @nnx.vmap(in_axes=0)
    def create(key):
        return Theirs(nnx.Rngs(key))

    return ours, copied(ours, create(jax.random.split(jax.random.key(0), N)))


def close(a, b):
    assert_close(np.reshape(a, -1), np.reshape(b, -1), rtol=2e-5, atol=2e-5)


def same_gradients(ours, theirs):
    close(ours.linear.weight, theirs.linear.kernel[...])
    close(ours.linear.bias, theirs.linear.bias[...])
    close(ours.bn.scale, theirs.bn.scale[...])
    close(ours.bn.offset, theirs.bn.bias[...])


def same_statistics(ours, theirs):
    """Their averages start at 0 and 1, ours are debiased: the mean shows the batch's."""
    decayed = (1 - 0.9) * ours.bn.ema_mean.averages
    close(decayed, theirs.bn.mean[...])


def test_grad():
    ours = Ours()
    theirs = copied(ours, Theirs(nnx.Rngs(0)))
    x = batch(5, D)

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    def loss_and_model(model, x):
        return loss(model, x), model

    grads, new = T.grad(loss_and_model, has_aux=True)(ours, x)
    same_gradients(grads, nnx.grad(loss)(theirs, x))
    same_statistics(new, theirs)


def test_vmap_and_its_gradient():
    ours, theirs = build_many()
    x = batch(N, 5, D)

    def loss_of(vmap):
        def loss(model, x):
            y = vmap(lambda model, x: model(x), in_axes=(0, 0))(model, x)
            return jnp.sum(y**2)

        return loss

    def loss_and_model(model, x):
        return loss_of(T.vmap)(model, x), model

    grads, new = T.grad(loss_and_model, has_aux=True)(ours, x)
    same_gradients(grads, nnx.grad(loss_of(nnx.vmap))(theirs, x))
    same_statistics(new, theirs)


@pytest.mark.parametrize("with_remat", [False, True])
def test_scan_of_remat_and_its_gradient(with_remat):
    ours, theirs = build_many()
    x = batch(5, D)

    def loss_of(scan, remat):
        layer = remat(lambda model, x: model(x)) if with_remat else (lambda model, x: model(x))
        return lambda model, x: jnp.sum(scan(layer)(model, x) ** 2)

    def our_scan(layer):
        scanned = T.scan(lambda model, x: (layer(model, x), None), carry_argnum=1)
        return lambda model, x: scanned(model, x)[0]

    their_scan = functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)

    def loss_and_model(model, x):
        return loss_of(our_scan, T.remat)(model, x), model

    grads, new = T.grad(loss_and_model, has_aux=True)(ours, x)
    same_gradients(grads, nnx.grad(loss_of(their_scan, nnx.remat))(theirs, x))
    same_statistics(new, theirs)


def test_jit():
    ours = Ours()
    theirs = copied(ours, Theirs(nnx.Rngs(0)))
    x = batch(5, D)
    new, y = T.jit(lambda model, x: (model, model(x)))(ours, x)
    close(y, nnx.jit(lambda model, x: model(x))(theirs, x))
    same_statistics(new, theirs)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_switch_and_its_gradient(index):
    ours = Ours()
    theirs = copied(ours, Theirs(nnx.Rngs(0)))
    x = batch(5, D)

    def loss_of(switch):
        def loss(model, index):
            branches = [
                lambda model, x: x,
                lambda model, x: model(x),
                lambda model, x: model(model(2 * x)),
            ]
            return jnp.sum(switch(index, branches, model, x) ** 2)

        return loss

    def loss_and_model(model, index):
        return loss_of(T.switch)(model, index), model

    grads, new = T.grad(loss_and_model, has_aux=True)(ours, index)
    same_gradients(grads, nnx.grad(loss_of(nnx.switch))(theirs, index))
    assert float(new.bn.ema_mean.debias) == (index > 0)


@pytest.mark.parametrize("loop", ["fori", "while"])
def test_loops(loop):
    ours = Ours()
    theirs = copied(ours, Theirs(nnx.Rngs(0)))
    x = batch(5, D)

    def step(value):
        model, x, count = value
        return model, model(x), count + 1

    def run(model, fori_loop, while_loop):
        if loop == "fori":
            return fori_loop(0, 3, lambda i, value: step(value), (model, x, 0))
        return while_loop(lambda value: value[2] < 3, step, (model, x, 0))

    _, y, _ = run(ours, T.fori_loop, T.while_loop)
    _, expected, _ = run(theirs, nnx.fori_loop, nnx.while_loop)
    close(y, expected)
