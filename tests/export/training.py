"""A small net of the digits, a step of its training, and the data; shared by tests."""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import pax_export as pax

BATCH = 32


def make_net():
    return pax.Sequential(
        pax.Conv2D(1, 4, 3, stride=2, with_bias=False),
        pax.BatchNorm2D(4),
        jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1),
        pax.Dropout(0.1),
        pax.Linear(64, 10),
    )


def make_optimizer(net):
    return pax.optim.from_optax(optax.adam(1e-2))(net.parameters())


def loss_fn(net, images, labels):
    logits = net(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), net


@jax.jit
def step(net, optimizer, images, labels):
    def of(params):
        after, (loss, _) = pax.module_and_value(loss_fn)(
            net.update_parameters(params), images, labels
        )
        return loss, after

    (loss, net), gradients = jax.value_and_grad(of, has_aux=True)(net.parameters())
    return *pax.optim.apply_gradients(net, optimizer, gradients), {"loss": loss}


def batches(count):
    """So many batches of images ``[batch, 8, 8, 1]`` and labels ``[batch]``."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    return [
        (images[start : start + BATCH], labels[start : start + BATCH])
        for start in range(0, count * BATCH, BATCH)
    ]
