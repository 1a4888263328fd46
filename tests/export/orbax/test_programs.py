"""Programs in the manner of real ones, which say `orbax.export` in one line.

Each is run as it is written for orbax.export, with that line changed: one that
exports a network for images with a symbolic or a fixed batch, one that exports
again and again while it trains, and one that serves a policy of several
inputs.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf

from tests.closeness import assert_close

IMAGES = """
from orbax.export import ExportManager, JaxModule, ServingConfig


class Net:
    def init(self, key, image):
        return {"params": {"Conv_0": {"kernel": jax.random.normal(key, (3, 3, 1, 4))}}}

    def apply(self, variables, x):
        x = jax.lax.conv_general_dilated(
            x, variables["params"]["Conv_0"]["kernel"], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.log_softmax(jax.nn.gelu(x).mean((1, 2)))


def export_net(model_path, batch_size):
    model = Net()
    params = model.init(jax.random.PRNGKey(123), jnp.ones((1, 8, 8, 1)))
    jax_module = JaxModule(
        params,
        model.apply,
        trainable=False,
        input_polymorphic_shape="(b, ...)" if batch_size is None else None)
    em = ExportManager(jax_module, [
        ServingConfig(
            "serving_default",
            input_signature=[tf.TensorSpec([batch_size, 8, 8, 1], tf.float32, name="inputs")],
            tf_postprocessor=lambda x: dict(outputs=x)),
    ])
    em.save(model_path)
    loaded = tf.saved_model.load(model_path)
    inputs = jnp.ones((batch_size or 1, 8, 8, 1))
    return (loaded.signatures["serving_default"](inputs=inputs)["outputs"],
            model.apply(params, inputs))
"""

TRAINING = """
from orbax import export as oex


def predict(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def train(export_base_dir, steps, export_interval):
    params = [{"kernel": jnp.ones((m, n)), "bias": jnp.zeros(n)} for m, n in ((1, 8), (8, 1))]
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(params)
    x = np.random.default_rng(0).normal(size=(32, 1))
    y = np.sin(x)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean(optax.squared_error(predict(p, x), y)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jax_module = oex.JaxModule(params, predict, input_polymorphic_shape="b, ...")
    serving_config = oex.ServingConfig(
        "serving_default",
        input_signature=[tf.TensorSpec(shape=[None, 1], dtype=tf.float32, name="x")],
        tf_postprocessor=lambda out: {"y": out})
    export_mgr = oex.ExportManager(jax_module, [serving_config])
    history = {}
    for i in range(1, steps + 1):
        params, opt_state, _ = step(params, opt_state)
        if i % export_interval == 0:
            jax_module.update_variables(params)
            export_mgr.save(os.path.join(export_base_dir, str(i)))
            history[i] = predict(params, jnp.ones((3, 1)))
    return history
"""

POLICY = """
from orbax.export import ExportManager, JaxModule, ServingConfig


class ActorModule(JaxModule):
    def __init__(self, variables):
        def actor(params, inputs):
            obs, cmd = inputs
            return jnp.tanh(obs["joints"] @ params["w"] + cmd["speed"])

        super().__init__(
            params=variables,
            apply_fn=actor,
            input_polymorphic_shape=None,
            trainable=False,
            jit_compile=False)


def export_policy(variables, path):
    signature = [(
        {"joints": tf.TensorSpec((1, 4), tf.float32, name="joints")},
        {"speed": tf.TensorSpec((1, 2), tf.float32, name="speed")})]
    configs = [ServingConfig("serving_default", input_signature=signature,
                             tf_postprocessor=lambda x: {"actions": x})]
    module = ActorModule(variables)
    manager = ExportManager(module, configs)
    manager.save(path)
    joints, speed = np.ones((1, 4), np.float32), np.ones((1, 2), np.float32)
    loaded = manager.load(path)
    called = loaded(({"joints": joints}, {"speed": speed}))
    return called["actions"], loaded.signatures["serving_default"](joints=joints, speed=speed)
"""


def program(source):
    changed = source.replace("from orbax.export", "from pax_export.export.orbax")
    changed = changed.replace("from orbax import export", "from pax_export.export import orbax")
    names = {"jax": jax, "jnp": jnp, "np": np, "tf": tf, "os": os, "optax": optax}
    names["__name__"] = "program"
    exec(compile(changed, "program", "exec"), names)
    return names


@pytest.mark.parametrize("batch", [None, 2])
def test_a_network_for_images(batch, tmp_path):
    found, expected = program(IMAGES)["export_net"](str(tmp_path / "model"), batch)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_exports_while_it_trains(tmp_path):
    history = program(TRAINING)["train"](str(tmp_path), 6, 3)
    assert sorted(os.listdir(tmp_path)) == ["3", "6"]
    for step, expected in history.items():
        loaded = tf.saved_model.load(str(tmp_path / str(step)))
        found = loaded.signatures["serving_default"](x=tf.ones((3, 1)))["y"]
        assert_close(found, expected, rtol=1e-5)


def test_a_policy_of_several_inputs(tmp_path):
    variables = {"w": jnp.ones((4, 2))}
    called, served = program(POLICY)["export_policy"](variables, str(tmp_path / "model"))
    assert_close(called, np.tanh(np.full((1, 2), 5.0)), rtol=1e-6)
    assert_close(served["actions"], called)


def test_what_tensorflow_itself_saves_of_a_module(tmp_path):
    """As the guide of TensorFlow Lite saves one, without a manager."""
    from pax_export.export.orbax import JaxModule

    table = jax.random.normal(jax.random.key(0), (512,))
    module = JaxModule({}, lambda _, x: jnp.sin(x) + table.sum(), input_polymorphic_shape="b, ...")
    tf.saved_model.save(
        module,
        str(tmp_path / "model"),
        signatures=module.methods[JaxModule.DEFAULT_METHOD_KEY].get_concrete_function(
            tf.TensorSpec(shape=(None,), dtype=tf.float32, name="input")
        ),
        options=tf.saved_model.SaveOptions(experimental_custom_gradients=True),
    )
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    found = loaded.signatures["serving_default"](input=tf.ones(3))["output_0"]
    assert_close(found, np.sin(np.ones(3)) + table.sum(), rtol=1e-5)
