"""Exports through orbax's interface: `JaxModule`, `ExportManager` and `ServingConfig`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import pax_export as pax
from pax_export.export.orbax import (
    ExportManager,
    JaxModule,
    ServingConfig,
    TensorSpecWithDefault,
    utils,
)
from tests.export.same_bytes.exports import without_locations

_ANY = "b, ..."
_X = tf.TensorSpec([None, 6], tf.float32, name="x")


def _params() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "body": {"~": {"w": jax.random.normal(keys[0], (6, 8))}},
        "head": [0.1 * jax.random.normal(keys[1], (8, 4))],
        "scale": 0.5,
    }


def _classify(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["body"]["~"]["w"]) * params["scale"]
    best, places = jax.lax.top_k(jax.lax.erf(hidden @ params["head"][0]), 2)
    return {"scores": (best, hidden), "places": places}


def _spread(params: Any, x: Any) -> Any:
    factor = jnp.linalg.cholesky(jnp.einsum("bi,bj->bij", x, x) + jnp.eye(6))
    return jnp.einsum("bij,jk->bik", factor, params["body"]["~"]["w"]).sum(-1)


def _module(function: Any = _classify, **options: Any) -> JaxModule:
    options.setdefault("input_polymorphic_shape", _ANY)
    return JaxModule(options.pop("params", None) or _params(), function, **options)


def _save(module: JaxModule, path: Path, *configs: ServingConfig, **options: Any) -> None:
    chosen = list(configs) or [ServingConfig("serving_default", [_X])]
    ExportManager(module, chosen).save(path, **options)


def _plain(path: Path) -> None:
    _save(_module(), path)


def _trainable(path: Path) -> None:
    _save(_module(trainable=True), path)


def _some_trainable(path: Path) -> None:
    chosen = {"body": True, "head": [False], "scale": False}
    _save(_module(trainable=chosen, jit_compile=False, name="named"), path)


def _several(path: Path) -> None:
    module = _module(
        {"classify": _classify, "spread": _spread},
        trainable=True,
        input_polymorphic_shape={"classify": _ANY, "spread": _ANY},
    )
    _save(
        module,
        path,
        ServingConfig("serving_default", [_X], method_key="classify"),
        ServingConfig(["spread", "again"], [_X], method_key="spread"),
        ServingConfig(
            "text", [tf.TensorSpec([None], tf.string, name="text")], _numbers, _beside,
            method_key="classify", preprocess_output_passthrough_enabled=True,
        ),
    )  # fmt: skip


def _numbers(text: Any) -> Any:
    numbers = tf.strings.to_number(tf.strings.split(text, ",").to_tensor(), tf.float32)
    return tf.reshape(numbers, [-1, 6]), {"text": text}


def _beside(output: Any, beside: Any) -> Any:
    return {"places": output["places"], "text": beside["text"]}


def _preprocessed(path: Path) -> None:
    """A vocabulary in a file, before the model; a `tf.function` says what it takes."""
    file = path.parent / "words.txt"
    file.write_text("good\nbad\nfilm")
    whole, line = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    initializer = tf.lookup.TextFileInitializer(str(file), tf.string, whole, tf.int64, line)
    table = tf.lookup.StaticHashTable(initializer, 0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
    def look_up(words: Any) -> Any:
        return tf.one_hot(tf.cast(table.lookup(words), tf.int32), 6)

    _save(_module(), path, ServingConfig("serving_default", tf_preprocessor=look_up))


def _fixed(path: Path) -> None:
    module = _module(input_polymorphic_shape=None)
    _save(module, path, ServingConfig("fixed", [tf.TensorSpec([2, 6], tf.float32, name="x")]))


def _nested(path: Path) -> None:
    """Nested inputs and outputs, and an argument with a default before the model."""

    def scaled(params: Any, inputs: Any) -> Any:
        return {"y": [inputs["x"] @ params["w"], {"scale": inputs["scale"]}]}

    module = _module(
        scaled, params={"w": jnp.ones((6, 2))}, input_polymorphic_shape={"x": _ANY, "scale": None}
    )
    scale = TensorSpecWithDefault(tf.TensorSpec([], tf.float32, name="scale"), 2.0)
    config = ServingConfig(
        "serving_default", [_X, scale], lambda x, scale: {"x": x, "scale": scale}
    )
    _save(module, path, config)


def _bfloat16(path: Path) -> None:
    _save(_module(utils.with_bfloat16(_classify)), path)


def _constrained(path: Path) -> None:
    options = {
        "polymorphic_constraints": ("b >= 2",),
        "native_serialization_platforms": ("cpu",),
        "with_gradient": True,
    }
    _save(_module(trainable=True, jax2tf_kwargs=options), path)


def _updated(path: Path) -> None:
    module = _module(trainable=True)
    manager = ExportManager(module, [ServingConfig("serving_default", [_X])])
    manager.save(path)
    module.update_variables(jax.tree.map(lambda leaf: 2 * leaf, _params()))
    manager.save(path)


def _overridden(path: Path) -> None:
    module = _module()
    method = module.methods[JaxModule.DEFAULT_METHOD_KEY]
    places = tf.function(lambda x: {"places": method(x)["places"]}, input_signature=[_X])
    _save(module, path, signature_overrides={"places": places})


def _of_this_package(path: Path) -> None:
    net = pax.Sequential(pax.Linear(6, 4), pax.LayerNorm(4, -1, True, True), jax.nn.relu).eval()
    _save(_module(lambda net, x: net(x), params=net, trainable=True), path)


def _tied_and_closed_over(path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    tied = jnp.ones((6, 6))

    def function(params: Any, x: Any) -> Any:
        return x @ params["a"] @ params["b"] @ table

    _save(_module(function, params={"a": tied, "b": tied}, trainable=True), path)


def _exported_map(path: Path) -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), jnp.float32)
    functions = {"tanh": jnp.tanh, "twice": lambda x: 2 * x}
    with without_locations():
        exported = {
            key: jax.export.export(jax.jit(function), platforms=("cpu",))(x)
            for key, function in functions.items()
        }
        utils.save_jax_exported_map(path, exported, vjp_order=1)


#: What writes each export, by its name.
EXPORTS: dict[str, Callable[[Path], None]] = {
    "plain": _plain,
    "trainable": _trainable,
    "some trainable": _some_trainable,
    "several signatures": _several,
    "preprocessed": _preprocessed,
    "fixed": _fixed,
    "nested": _nested,
    "bfloat16": _bfloat16,
    "constrained": _constrained,
    "updated": _updated,
    "overridden": _overridden,
    "a module": _of_this_package,
    "tied and closed over": _tied_and_closed_over,
    "exported map": _exported_map,
}
