"""Exports through orbax's interface, for processes that have TensorFlow alone.

With PAX_EXPORT_ARTIFACTS set, they are left there for `test_served_orbax.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
from tests.consumers import artifacts

TABLE = np.asarray(jax.random.normal(jax.random.key(3), (64, 8)))


def params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "body": {"~": {"w": jax.random.normal(keys[0], (6, 64))}},
        "head": [0.1 * jax.random.normal(keys[1], (64, 4))],
        "scale": 0.5,
    }


def classify(params, x):
    hidden = jax.nn.gelu(x @ params["body"]["~"]["w"]) * params["scale"]
    best, places = jax.lax.top_k(jax.lax.erf(hidden @ params["head"][0]), 2)
    return {"scores": (best, hidden @ TABLE), "places": places}


def spread(params, x):
    factor = jnp.linalg.cholesky(jnp.einsum("bi,bj->bij", x, x) + jnp.eye(6))
    return jnp.einsum("bij,jk->bik", factor, params["body"]["~"]["w"]).sum(-1)


def before(text):
    numbers = tf.strings.to_number(tf.strings.split(text, ",").to_tensor(), tf.float32)
    return tf.reshape(numbers, [-1, 6]), {"text": text}


def after(output, beside):
    return {"places": output["places"], "text": beside["text"]}


def configs():
    x = tf.TensorSpec([None, 6], tf.float32, name="x")
    text = tf.TensorSpec([None], tf.string, name="text")
    return [
        ServingConfig("serving_default", [x], method_key="classify"),
        ServingConfig(["spread", "again"], [x], method_key="spread"),
        ServingConfig(
            "text",
            [text],
            before,
            after,
            method_key="classify",
            preprocess_output_passthrough_enabled=True,
        ),
    ]


def gradients(params, x):
    """Of half the sum of squares of the last scores, by the variables' names."""

    def loss(params):
        return 0.5 * (classify(params, x)["scores"][1] ** 2).sum()

    found = jax.grad(loss)(params)
    return {"body._.w": found["body"]["~"]["w"], "scale": found["scale"]}


def test_export_for_consumers(tmp_path):
    folder = (artifacts.root() or tmp_path) / artifacts.ORBAX
    model = params()
    module = JaxModule(
        model,
        {"classify": classify, "spread": spread},
        trainable=True,
        input_polymorphic_shape={"classify": "b, ...", "spread": "b, ..."},
    )
    ExportManager(module, configs()).save(folder / "model")
    random, arrays = np.random.default_rng(0), {}
    run = jax.jit(lambda x: (classify(model, x), spread(model, x), gradients(model, x)))
    for batch in artifacts.BATCHES:
        x = random.normal(size=(batch, 6)).astype(np.float32)
        output, arrays[f"{batch}/spread"], slopes = run(x)
        arrays[f"{batch}/x"] = x
        arrays[f"{batch}/scores.0"], arrays[f"{batch}/scores.1"] = output["scores"]
        arrays[f"{batch}/places"] = output["places"]
        for name, value in slopes.items():
            arrays[f"{batch}/gradient/{name}"] = value
    np.savez(folder / "orbax_cases.npz", **{key: np.asarray(v) for key, v in arrays.items()})
    graph = (folder / "model" / "saved_model.pb").read_bytes()
    assert TABLE.tobytes() not in graph  # it is a variable
