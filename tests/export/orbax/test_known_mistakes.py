"""What orbax.export 0.0.8 gets wrong, each with a test of its own."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from pax_export.errors import ExportPathError, StateChangeError, UnsupportedDtypeError
from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
from pax_export.export.orbax import config as orbax_config
from tests.closeness import assert_close
from tests.export.orbax.models import KEY, X, call, linear, module, params, x_spec
from tests.refusals import refused

BIG = np.asarray(jax.random.normal(jax.random.key(0), (3, 256)))


def saved(tmp_path, made, *configs, **arguments):
    manager = ExportManager(made, configs or [ServingConfig("s", [x_spec()])])
    manager.save(tmp_path / "model", **arguments)
    return manager.load(tmp_path / "model")


def stored_bytes(folder):
    return sum(os.path.getsize(file) for file in (folder / "model").rglob("*") if file.is_file())


@pytest.mark.parametrize("trainable", [False, True])
def test_a_closed_over_array_is_one_variable(trainable, tmp_path):
    functions = {
        "one": lambda p, x: {"y": (x * p["w"]) @ BIG},
        "two": lambda p, x: {"y": (x + p["w"]) @ BIG},
    }
    made = JaxModule(
        {"w": jnp.ones(3)},
        functions,
        trainable=trainable,
        input_polymorphic_shape={"one": "b, ...", "two": "b, ..."},
    )
    configs = [ServingConfig(key, [x_spec()], method_key=key) for key in functions]
    loaded = saved(tmp_path, made, *configs)
    assert BIG.tobytes() not in (tmp_path / "model" / "saved_model.pb").read_bytes()
    assert [variable.shape.as_list() for variable in made.variables] == [[3, 256], [3]]
    for key, function in functions.items():
        with tf.GradientTape() as tape:
            found = loaded.signatures[key](x=tf.constant(X))["y"]
            total = tf.reduce_sum(found)
        assert_close(found, function({"w": 1.0}, X)["y"], rtol=1e-5, atol=1e-5)
        if trainable:
            (variable,) = loaded.signatures[key].trainable_variables
            assert tape.gradient(total, variable).shape == [3]


def test_tied_weights_are_saved_once(tmp_path):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
    made = module(lambda p, x: {"y": x @ p["a"] @ p["b"]}, params={"a": w, "b": w})
    saved(tmp_path, made, ServingConfig("s", [tf.TensorSpec([None, 256], name="x")]))
    assert stored_bytes(tmp_path) < 1.5 * w.nbytes


def test_two_leaves_of_one_name_have_two():
    made = JaxModule({"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, lambda p, x: x)
    assert {variable.name for variable in made.variables} == {"a.b:0", "a.b-1:0"}


def test_nested_outputs_are_saved(tmp_path):
    def function(params, x):
        y = linear(params, x)
        return {"pair": (y, [2 * y]), "one": y.sum(-1)}

    made = module(function)
    loaded = saved(tmp_path, made)
    found, expected = loaded.signatures["s"](x=tf.constant(X)), function(params(), X)
    assert sorted(found) == ["one", "pair.0", "pair.1.0"]
    assert_close(found["pair.1.0"], expected["pair"][1][0])
    assert_close(loaded(tf.constant(X))["pair"][1][0], expected["pair"][1][0])


def test_tuples_in_tuples_are_saved(tmp_path):
    made = module(lambda p, x: (linear(p, x), {"twice": 2 * linear(p, x)}))
    found = saved(tmp_path, made).signatures["s"](x=tf.constant(X))
    assert sorted(found) == ["output_0", "output_1.twice"]


@dataclasses.dataclass
class Scores:
    """An output of a class that TensorFlow does not know."""

    best: jax.Array
    every: jax.Array


jax.tree_util.register_dataclass(Scores, ["best", "every"], [])


def test_outputs_of_classes_are_dicts_of_their_fields(tmp_path):
    made = module(lambda p, x: Scores(linear(p, x).max(-1), linear(p, x)))
    found = saved(tmp_path, made).signatures["s"](x=tf.constant(X))
    assert_close(found["best"], linear(params(), X).max(-1))


def test_a_model_of_two_signatures_can_be_called(tmp_path):
    loaded = saved(
        tmp_path, module(), ServingConfig("a", [x_spec()]), ServingConfig("b", [x_spec()])
    )
    assert_close(loaded(tf.constant(X)), linear(params(), X))


def test_two_preprocessors_alone_are_two(tmp_path):
    with orbax_config.obx_export_tf_preprocess_only(True):
        loaded = saved(
            tmp_path,
            module(),
            ServingConfig("a", [x_spec()], tf_preprocessor=lambda x: x + 1),
            ServingConfig("b", [x_spec()], tf_preprocessor=lambda x: x + 2),
        )
    for key, more in (("a", 1), ("b", 2)):
        assert_close(loaded.signatures[key](x=tf.constant(X))["output_0"], X + more)


def test_no_stale_file_stays(tmp_path):
    saved(tmp_path, module())
    (tmp_path / "model" / "variables" / "variables.data-00001-of-00002").write_text("stale")
    saved(tmp_path, module())
    assert not list(tmp_path.rglob("*-00001-of-00002"))


def test_a_file_that_the_model_does_not_name_is_not_removed(tmp_path):
    saved(tmp_path, module())
    (tmp_path / "model" / "assets" / "words.txt").write_text("mine")
    with refused(ExportPathError, "words.txt"):
        saved(tmp_path, module())
    assert (tmp_path / "model" / "assets" / "words.txt").read_text() == "mine"


def test_a_save_that_fails_leaves_the_old_export(tmp_path, monkeypatch):
    made = module()
    saved(tmp_path, made)
    before = (tmp_path / "model" / "saved_model.pb").read_bytes()
    write = tf.saved_model.save

    def breaks(*arguments, **options):
        write(*arguments, **options)
        raise OSError("no space left")

    monkeypatch.setattr(tf.saved_model, "save", breaks)
    with refused(OSError, "no space left"):
        saved(tmp_path, made)
    assert (tmp_path / "model" / "saved_model.pb").read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]


def test_integers_are_not_narrowed_in_silence():
    made = module(lambda p, x: x + 1, input_polymorphic_shape=None)
    with refused(UnsupportedDtypeError, "int32"):
        made.methods[KEY](tf.constant(2**40 + 5, tf.int64))
    assert call(made, np.float64(0.5)) == np.float32(1.5)  # as jax takes numpy's floats


@pytest.mark.parametrize("trainable", [False, True])
def test_the_options_of_the_caller_stay_as_they_are(trainable, tmp_path):
    for given in (True, False):
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=given)
        saved(tmp_path, module(trainable=trainable), save_options=options)
        assert options.experimental_custom_gradients is given


def test_a_loaded_model_with_an_integer_output_can_be_differentiated(tmp_path):
    def classify(params, x):
        logits = linear(params, x)
        return {"logits": logits, "class": jnp.argmax(logits, -1)}

    loaded = saved(tmp_path, module(classify, trainable=True))
    variables = {v.name: v for v in loaded.signatures["s"].trainable_variables}
    with tf.GradientTape() as tape:
        output = loaded.signatures["s"](x=tf.constant(X))
        loss = tf.reduce_sum(output["logits"] ** 2)
    found = dict(zip(variables, tape.gradient(loss, list(variables.values()))))
    expected = jax.grad(lambda p: (linear(p, X) ** 2).sum())(params())
    for name in ("w", "b"):
        assert_close(found[f"{name}:0"], expected[name], rtol=1e-5)
    np.testing.assert_array_equal(output["class"], jnp.argmax(linear(params(), X), -1))


def test_what_lapack_does_in_jax_runs_in_tensorflow(tmp_path):
    def function(params, x):
        spread = jnp.einsum("bi,bj->bij", x, x) + jnp.eye(3)
        return {"y": jnp.linalg.cholesky(spread) @ params["w"]}

    loaded = saved(tmp_path, module(function))
    found = loaded.signatures["s"](x=tf.constant(X))["y"]
    assert_close(found, function(params(), X)["y"], rtol=1e-4)


def test_a_net_in_train_mode_is_refused(tmp_path):
    key = jax.random.key(0)
    noisy = JaxModule(params(), lambda p, x: {"y": x * jax.random.normal(key, x.shape)})
    with refused(StateChangeError, "a key that the function closes over") as caught:
        saved(tmp_path, noisy, ServingConfig("s", [tf.TensorSpec((2, 3))]))
    assert "state=" not in caught.value.write
