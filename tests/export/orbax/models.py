"""Small models as programs of orbax.export have them: params, and a function of one input."""

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from pax_export.export.orbax import JaxModule

KEY = JaxModule.DEFAULT_METHOD_KEY
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def params():
    return {"w": jnp.arange(6.0).reshape(3, 2), "b": jnp.ones(2)}


def linear(params, x):
    return x @ params["w"] + params["b"]


def module(function=linear, **arguments):
    arguments.setdefault("input_polymorphic_shape", "b, ...")
    given = arguments.pop("params") if "params" in arguments else params()
    return JaxModule(given, function, **arguments)


def x_spec(batch=None, name="x"):
    return tf.TensorSpec([batch, 3], tf.float32, name=name)


def call(jax_module, x=X, key=KEY):
    return jax.tree_util.tree_map(lambda each: each.numpy(), jax_module.methods[key](x))


def values(jax_module):
    return {variable.name: variable.numpy() for variable in jax_module.variables}
