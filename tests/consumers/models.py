"""The models that every consumer must be able to serve, one of each kind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import pax_export as pax
from pax_export.experimental.graph import build_graph_module
from tests.consumers import artifacts

TABLE = jax.random.normal(jax.random.key(3), (64, 8))


class ConvNet(pax.Module):
    """What the example on digits trains, in small."""

    def __init__(self):
        super().__init__()
        self.body = pax.Sequential(
            pax.Conv2D(1, 8, 3),
            pax.BatchNorm2D(8),
            jax.nn.relu,
            pax.Conv2D(8, 16, 3, stride=2),
            pax.BatchNorm2D(16),
            jax.nn.relu,
            pax.Dropout(0.5),
        )
        self.head = pax.Linear(4 * 4 * 16, 10)

    def __call__(self, x):
        features = self.body(x)
        logits = self.head(features.reshape(features.shape[0], -1))
        return {"logits": logits, "class": jnp.argmax(logits, axis=-1)}


class Average(pax.Module):
    """Keeps a running mean of what it sees, and counts."""

    def __init__(self):
        super().__init__()
        self.mean = jnp.zeros(3)
        self.count = jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.count = self.count + 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(axis=0)
        return {"centred": x - self.mean, "count": self.count}


class Tagger(pax.Module):
    """An LSTM over time, and the best tags of each step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = pax.LSTM(4, 6), pax.Linear(6, 5)

    def __call__(self, x):
        hidden = pax.scan(self.cell, self.cell.initial_state(x.shape[0]), x, time_major=False)[1]
        scores, tags = jax.lax.top_k(self.head(hidden), 2)
        return {"scores": scores, "tags": tags}


class Noisy(pax.Module):
    """Draws with a typed key that is part of it."""

    def __init__(self):
        super().__init__()
        self.key = jax.random.key(5)

    def __call__(self, x):
        normal, places, cut = jax.random.split(self.key, 3)
        return {
            "noisy": x + jax.random.normal(normal, x.shape),
            "chosen": jax.random.categorical(places, x, axis=-1),
            "cut": x + jax.random.truncated_normal(cut, -1.0, 1.0, (4,)),
        }


def forked(x):
    """A graph of modules and operators."""
    hidden = x >> pax.Linear(4, 6) >> jnp.tanh
    return (hidden & x) >> (lambda pair: jnp.concatenate(pair, axis=-1)) >> pax.Linear(10, 3)


def special_functions(params, x):
    best, places = jax.lax.top_k(jax.nn.softmax(x @ params["w"]), 3)
    inside = jnp.tanh(x) * 0.9
    return {
        "best": jax.lax.erf(best) + jnp.arcsinh(best),
        "places": places,
        "mixed": jnp.sinh(0.01 * x @ params["w"] @ TABLE),
        "inverse": jnp.arcsin(inside) + jnp.arccos(inside) + jnp.arctanh(inside),
        "growing": jnp.cosh(inside) + jnp.tan(inside) + jnp.arccosh(1.5 + inside),
        "sorted": jnp.sort(x, axis=-1),
        "order": jnp.argsort(x, axis=-1),
        "parted": jnp.sort(jnp.partition(x, 2, axis=-1)[:, :2]),
        "median": jnp.median(x, axis=-1),
    }


def indexing(params, x):
    rows = jnp.argsort(x, axis=-1)[:, :2]
    return {
        "picked": jax.vmap(lambda row, i: row[i])(x, rows),
        "along": jnp.take_along_axis(x, rows, axis=1),
        "window": jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, i[:1], (3,)))(x, rows),
        "replaced": jax.vmap(lambda row, i: row.at[i].set(params))(x, rows),
        "added": jax.vmap(lambda row, i: row.at[i].add(row[0]))(x, rows),
        "top": jax.vmap(lambda row: jax.lax.top_k(row, 2)[1])(x),
    }


def decompose(scale, x):
    """All of linear algebra, by what does not depend on signs."""
    spread = scale * jnp.einsum("bi,bj->bij", x, x) + jnp.eye(3) + jnp.diag(jnp.arange(3.0))
    values, vectors = jnp.linalg.eigh(spread)
    packed, _, order = jax.lax.linalg.lu(spread)
    lower = jnp.linalg.cholesky(spread)
    return {
        "cholesky": lower,
        "eigh": (vectors * values[:, None, :]) @ vectors.mT,
        "svd": jnp.linalg.svd(spread)[1],
        "qr": jnp.abs(jnp.linalg.qr(spread)[1]),
        "lu": packed,
        "order": order,
        "solve": jnp.linalg.solve(spread, x[..., None]),
        "triangular_solve": jax.scipy.linalg.solve_triangular(lower, x[..., None], lower=True),
        "inv": jnp.linalg.inv(spread),
        "det": jnp.linalg.det(spread),
        "lstsq": jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0])(spread, x),
        "pinv": jnp.linalg.pinv(spread),
        "expm": jax.scipy.linalg.expm(0.1 * spread),
    }


def mlp(params, x):
    hidden = jax.nn.gelu(x @ params["inner"]["w"] + params["inner"]["b"], approximate=False)
    logits = hidden @ params["outer"]
    return {"logits": logits, "class": jnp.argmax(logits, axis=-1)}


def parameters_of_mlp():
    keys = jax.random.split(jax.random.key(0), 2)
    inner = {"w": jax.random.normal(keys[0], (5, 6)), "b": jnp.ones(6)}
    return {"inner": inner, "outer": jax.random.normal(keys[1], (6, 4))}


def trained_conv_net():
    seen = jax.jit(pax.purecall)(ConvNet().train(), jnp.ones((4, 8, 8, 1)))
    return seen[0].eval()  # BatchNorm has seen data


def resnet():
    small = {"kernel_shape": 3, "stride": 1, "padding": "SAME"}
    ones = {"w_init": jax.nn.initializers.ones}
    return pax.nets.ResNet18(1, 3, logits_config=ones, initial_conv_config=small).eval()


def quantized():
    """A language model of integers: tied, its layers in a scan."""
    pax.seed_rng_key(0)
    config = pax.nets.DecoderConfig.llama(
        vocab_size=64, dim=32, num_layers=2, num_heads=2, hidden_dim=64, tied=True
    )
    small, _ = pax.quantize(pax.nets.Decoder(config), bits=4)
    return small, lambda net, x: {"logits": net((10 * jnp.abs(x)).astype(jnp.int32))}


#: How to make each model, what it takes, and more arguments for the export.
MODELS = {
    "conv_net": (trained_conv_net, "batch, 8, 8, 1", {}),
    "lstm": (Tagger, "batch, length, 4", {}),
    "transformer": (lambda: pax.nets.Transformer(8, 2, 2, 0.1).eval(), "batch, length, 8", {}),
    "resnet18": (resnet, "batch, 1, 16, 16", {}),
    "graph": (lambda: build_graph_module(forked)(jnp.zeros((3, 4))).eval(), "batch, 4", {}),
    "function": (
        lambda: ({"w": jax.random.normal(jax.random.key(1), (6, 64))}, special_functions),
        "batch, 6",
        {},
    ),
    "random": (Noisy, "batch, 4", {}),
    "indexing": (lambda: (jnp.ones(()), indexing), "batch, 6", {}),
    "linear_algebra": (lambda: (jnp.ones(()), decompose), "batch, 3", {}),
    "trainable": (lambda: (parameters_of_mlp(), mlp), "batch, 5", {"trainable": True}),
    "quantized": (quantized, "batch, 5", {}),
    "stateful": (Average, "batch, 3", {"state": "update"}),
}
MODELS = {
    name + suffix: (make, shape, options | {"operations": operations})
    for suffix, operations in (("", "xla"), ("_operations", "tensorflow"))
    for name, (make, shape, options) in MODELS.items()
    if not suffix or name in artifacts.OPERATIONS
}


def compiled(model):
    """What jax says; as constants, weights would be in the folder of compiled programs."""
    params, function = model if isinstance(model, tuple) else (model, _call)
    return functools.partial(jax.jit(function), params)


def _call(model, x):
    output = pax.purecall(model, x)[1]
    return output if isinstance(output, dict) else {"output": output}
