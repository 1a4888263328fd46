"""Exports the models that other processes must be able to serve.

With PAX_EXPORT_ARTIFACTS set, they are left there for `test_served.py`, which
runs where TensorFlow is and jax is not.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec, to_saved_model
from tests.consumers import artifacts


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

    def __call__(self, images):
        features = self.body(images)
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


TABLE = jax.random.normal(jax.random.key(3), (64, 8))


def special_functions(params, x):
    best, places = jax.lax.top_k(jax.nn.softmax(x @ params["w"]), 3)
    noise = jax.random.normal(params["key"], (8,))
    return {
        "best": jax.lax.erf(best) + jnp.arcsinh(best),
        "places": places,
        "mixed": jnp.sinh(0.01 * x @ params["w"] @ TABLE) + noise,
    }


def decompose(params, x):
    spread = jnp.einsum("bi,bj->bij", x, x) + jnp.eye(4)
    values, vectors = jnp.linalg.eigh(spread)
    return {
        "factor": jnp.linalg.cholesky(spread) * params["scale"],
        "restored": (vectors * values[:, None, :]) @ vectors.mT,
        "triangle": jnp.abs(jnp.linalg.qr(spread)[1]),
    }


def mlp(params, x):
    hidden = jnp.tanh(x @ params["inner"]["w"] + params["inner"]["b"])
    logits = hidden @ params["outer"]
    return {"logits": logits, "class": jnp.argmax(logits, axis=-1)}


def trained_conv_net():
    net = pax.purecall(ConvNet().train(), jnp.ones((4, 8, 8, 1)))[0]  # BatchNorm has seen data
    return net.eval(), lambda net, x: pax.purecall(net, x)[1]


def with_params(function, **params):
    return (params, function), lambda model, x: function(model[0], x)


def parameters_of_mlp():
    keys = jax.random.split(jax.random.key(0), 2)
    inner = {"w": jax.random.normal(keys[0], (5, 6)), "b": jnp.ones(6)}
    return {"inner": inner, "outer": jax.random.normal(keys[1], (6, 4))}


def build(name):
    """The model, how to call it, its input, and more arguments for the export."""
    if name == "conv_net":
        return *trained_conv_net(), "batch, 8, 8, 1", {}
    if name == "function":
        params = {"w": jax.random.normal(jax.random.key(1), (6, 64)), "key": jax.random.key(2)}
        return *with_params(special_functions, **params), "batch, 6", {}
    if name == "trainable":
        return *with_params(mlp, **parameters_of_mlp()), "batch, 5", {"trainable": True}
    if name == "stateful":
        return Average(), lambda net, x: pax.purecall(net, x)[1], "batch, 3", {"state": "update"}
    return *with_params(decompose, scale=jnp.ones(())), "batch, 4", {}


def gradients(params, x):
    """Of half the sum of squares of the logits."""

    def loss(params, x):
        return 0.5 * (mlp(params, x)["logits"] ** 2).sum()

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    flat, _ = jax.tree_util.tree_flatten_with_path(by_params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): g for path, g in flat}
    return {**named, "x": by_x}


def cases(name, model, call, shape):
    random = np.random.default_rng(0)
    arrays = {}
    for batch in artifacts.BATCHES:
        x = random.normal(size=(batch, *shape)).astype(np.float32)
        argument = "images" if name == "conv_net" else "x"
        arrays[f"{batch}/in/{argument}"] = x
        for key, value in call(model, x).items():
            arrays[f"{batch}/out/{key}"] = np.asarray(value)
        if name == "trainable":
            for key, value in gradients(model[0], x).items():
                arrays[f"{batch}/gradient/{key}"] = np.asarray(value)
    return arrays


@pytest.mark.parametrize("name", artifacts.NAMES)
def test_export_for_consumers(name, tmp_path):
    folder = (artifacts.root() or tmp_path) / name
    model, call, shape, options = build(name)
    report = to_saved_model(model, folder / "model", spec(shape), overwrite=True, **options)
    sizes = tuple(map(int, shape.split(", ")[1:]))
    np.savez(folder / "cases.npz", **cases(name, model, call, sizes))
    assert tuple(map(int, report.oldest_tensorflow.split("."))) == (2, 15)
    assert max(report.largest_error.values()) < 1e-3
    assert str(Path.cwd()).encode() not in (folder / "model" / "saved_model.pb").read_bytes()


def test_every_name_has_a_folder_of_its_own():
    assert len(set(artifacts.NAMES)) == len(artifacts.NAMES)
