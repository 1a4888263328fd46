"""A SavedModel as a user of plain jax2tf writes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_RANDOM = np.random.default_rng(0)
PARAMS = {"weight": _RANDOM.normal(size=(5, 6)).astype(np.float32), "bias": np.ones(6, np.float32)}


def model(params, x):
    """Composites, and indexing under vmap."""
    hidden = jax.lax.erf(x @ params["weight"] + params["bias"])
    best, places = jax.lax.top_k(hidden, 3)
    return {"best": best, "picked": jax.vmap(lambda row, i: row[i])(hidden, places)}


def save(folder, function=model, params=PARAMS, shape="(b, 5)"):
    """Writes a function of parameters and `x` with jax2tf alone, gradients included."""
    tf, jax2tf = _tools()
    module = tf.Module()
    module.params = {name: tf.Variable(jnp.asarray(value)) for name, value in params.items()}
    convert = jax2tf.convert(function, polymorphic_shapes=[None, shape])
    sizes = [int(word) if word.isdigit() else None for word in shape.strip("()").split(", ")]
    module.call = tf.function(
        lambda x: convert(module.params, x),
        input_signature=[tf.TensorSpec(sizes, tf.float32, name="x")],
        autograph=False,
    )
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(folder), {"serving_default": module.call}, options)


def _tools():
    import tensorflow as tf
    from jax.experimental import jax2tf

    return tf, jax2tf


def each_node(message, operation):
    """The nodes of this operation in a SavedModel, each with its function."""
    (graph,) = message.meta_graphs
    for function in graph.graph_def.library.function:
        for node in function.node_def:
            if node.op == operation:
                yield function, node
