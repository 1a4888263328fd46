"""What orbax.export 0.0.8 gets wrong, each with a test of its own."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from pax_export.errors import ExportPathError, StateChangeError, UnsupportedDtypeError
from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
from tests.closeness import assert_close
from tests.export.orbax.models import KEY, X, call, linear, module, params, x_spec
from tests.refusals import refused

BIG = np.asarray(jax.random.normal(jax.random.key(0), (3, 256)))


def saved(tmp_path, made, *configs, **arguments):
    manager = ExportManager(made, configs or [ServingConfig("s", [x_spec()])])
    manager.save(tmp_path / "model", **arguments)
    return manager.load(tmp_path / "model")


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


def test_two_leaves_of_one_name_have_two():
    made = JaxModule({"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, lambda p, x: x)
    assert {variable.name for variable in made.variables} == {"a.b:0", "a.b-1:0"}


@dataclasses.dataclass
class Scores:
    best: jax.Array
    every: jax.Array


jax.tree_util.register_dataclass(Scores, ["best", "every"], [])


NESTED = {
    "dict": (
        lambda y: {"pair": (y, [2 * y]), "one": y.sum(-1)},
        {"one": lambda y: y.sum(-1), "pair.0": lambda y: y, "pair.1.0": lambda y: 2 * y},
    ),
    "tuple": (
        lambda y: (y, {"twice": 2 * y}),
        {"output_0": lambda y: y, "output_1.twice": lambda y: 2 * y},
    ),
    "class": (lambda y: Scores(y.max(-1), y), {"best": lambda y: y.max(-1), "every": lambda y: y}),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_outputs_are_saved(kind, tmp_path):
    nest, flat = NESTED[kind]
    loaded = saved(tmp_path, module(lambda p, x: nest(linear(p, x))))
    found, y = loaded.signatures["s"](x=tf.constant(X)), linear(params(), X)
    assert sorted(found) == sorted(flat)
    for name, expected in flat.items():
        assert_close(found[name], expected(y))
    if kind == "dict":
        assert_close(loaded(tf.constant(X))["pair"][1][0], 2 * y)


def test_a_model_of_two_signatures_can_be_called(tmp_path):
    loaded = saved(
        tmp_path, module(), ServingConfig("a", [x_spec()]), ServingConfig("b", [x_spec()])
    )
    assert_close(loaded(tf.constant(X)), linear(params(), X))


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


def test_a_net_in_train_mode_is_refused(tmp_path):
    key = jax.random.key(0)
    noisy = JaxModule(params(), lambda p, x: {"y": x * jax.random.normal(key, x.shape)})
    with refused(StateChangeError, "a key that the function closes over") as caught:
        saved(tmp_path, noisy, ServingConfig("s", [tf.TensorSpec((2, 3))]))
    assert "state=" not in caught.value.write
