"""SavedModels: signatures, processors, and what else stands in the directory."""

import os
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import pax_export.export
from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
from tests.closeness import assert_close
from tests.export.orbax.models import X, linear, module, params, x_spec
from tests.refusals import refused


@pytest.fixture
def save(tmp_path):
    def run(made, *configs, **arguments):
        manager = ExportManager(made, configs)
        manager.save(str(tmp_path / "model"), **arguments)
        return manager.load(str(tmp_path / "model"))

    return run


def named(function):
    return lambda params, x: {"y": function(params, x)}


def test_a_signature(save):
    loaded = save(module(), ServingConfig("serving_default", [x_spec()]))
    signature = loaded.signatures["serving_default"]
    assert list(signature.structured_input_signature[1]) == ["x"]
    assert_close(signature(x=tf.constant(X))["output_0"], linear(params(), X))
    assert_close(loaded(tf.constant(X)), linear(params(), X))


def test_the_function_of_a_signature():
    manager = ExportManager(module(), [ServingConfig(["a", "b"], [x_spec()])])
    assert list(manager.serving_signatures) == ["a", "b"]
    assert isinstance(manager.tf_module, tf.Module)
    assert_close(manager.serving_signatures["a"](X), linear(params(), X))


def test_several_configs_methods_and_keys(save):
    functions = {"one": linear, "two": lambda p, x: 2 * linear(p, x)}
    made = JaxModule(
        params(), functions, input_polymorphic_shape=dict.fromkeys(functions, "b, ...")
    )
    loaded = save(
        made,
        ServingConfig("first", [x_spec()], method_key="one"),
        ServingConfig(["serving_default", "again"], [x_spec()], method_key="two"),
    )
    for key, factor in (("first", 1), ("serving_default", 2), ("again", 2)):
        (output,) = loaded.signatures[key](x=tf.constant(X)).values()
        assert_close(output, factor * linear(params(), X))
    assert_close(loaded(tf.constant(X)), 2 * linear(params(), X))


def test_the_preprocessor_knows_its_inputs(save):
    both = tf.function(
        lambda x, z: x + z, input_signature=[x_spec(), tf.TensorSpec([None, 3], name="z")]
    )
    loaded = save(module(), ServingConfig("s", tf_preprocessor=both))
    found = loaded.signatures["s"](x=tf.constant(X), z=tf.constant(X))["output_0"]
    assert_close(found, linear(params(), 2 * X))


def test_vocabularies_are_saved_whether_they_are_named_or_not(save, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("a\nb\nc\n")

    def table():
        rows = tf.lookup.TextFileInitializer(
            str(file), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )  # fmt: skip
        return tf.lookup.StaticHashTable(rows, -1)

    one, other = table(), table()

    def before(words):
        return tf.one_hot(tf.cast(one.lookup(words), tf.int32), 3)

    def before_too(words):
        return tf.one_hot(tf.cast(other.lookup(words), tf.int32), 3)

    spec = [tf.TensorSpec([None], tf.string, name="words")]
    loaded = save(
        module(),
        ServingConfig("named", spec, before, extra_trackable_resources=one),
        ServingConfig("found", spec, before_too),
    )
    file.unlink()
    for key in ("named", "found"):
        output = loaded.signatures[key](words=tf.constant(["c", "a"]))["output_0"]
        assert_close(output, linear(params(), np.eye(3)[[2, 0]]))


def test_the_resources_of_the_module_are_those_that_were_given(save):
    scale, other = tf.Variable(2.0), tf.Variable(3.0)
    for given, count in (({}, 0), ({"extra_trackable_resources": scale}, 1),
                         ({"extra_trackable_resources": [scale, other]}, 1)):  # fmt: skip
        config = ServingConfig("s", [x_spec()], lambda x: x * scale, lambda y: y * other, **given)
        loaded = save(module(), config)
        assert len(loaded.tf_trackable_resources) == count
        found = loaded.signatures["s"](x=tf.constant(X))["output_0"]
        assert_close(found, 3 * linear(params(), 2 * X))


def test_text_goes_past_the_model(save):
    config = ServingConfig(
        "s",
        [x_spec(), tf.TensorSpec([None], tf.string, name="id")],
        tf_preprocessor=lambda x, names: (x, {"id": names}),
        tf_postprocessor=lambda output, beside: {"y": output, **beside},
        preprocess_output_passthrough_enabled=True,
    )
    output = save(module(), config).signatures["s"](x=tf.constant(X), id=tf.constant(["a", "b"]))
    assert_close(output["y"], linear(params(), X))
    assert output["id"].numpy().tolist() == [b"a", b"b"]


def test_what_goes_past_needs_a_pair(save):
    options = {"preprocess_output_passthrough_enabled": True}
    config = ServingConfig("s", [x_spec()], lambda x: x, lambda y, beside: y, **options)
    with refused(ValueError, "preprocessor output", "tuple of two elements"):
        save(module(), config)


def test_overrides_go_before_the_configs(save):
    other = tf.function(lambda x: {"same": x}, input_signature=[x_spec()])
    loaded = save(
        module(),
        ServingConfig(["a", "b"], [x_spec()]),
        signature_overrides={"b": other, "c": other},
    )
    assert sorted(loaded.signatures) == ["a", "b", "c"]
    for key in ("b", "c"):
        assert_close(loaded.signatures[key](x=tf.constant(X))["same"], X)


def test_signatures_in_place_of_those_of_the_configs(tmp_path):
    other = tf.function(lambda x: {"same": x}, input_signature=[x_spec()])
    nested = module(lambda params, x: {"deep": {"y": linear(params, x)}})
    manager = ExportManager(nested, [ServingConfig(["a", "b"], [x_spec()])])
    chosen = {"other": other, "mine": manager.serving_signatures["b"]}
    manager.save(tmp_path / "1", serving_signatures=chosen)
    loaded = manager.load(tmp_path / "1")
    assert sorted(loaded.signatures) == ["mine", "other"]
    assert_close(loaded.signatures["mine"](x=tf.constant(X))["deep.y"], linear(params(), X))
    manager.save(tmp_path / "2", serving_signatures={}, signature_overrides={"c": other})
    assert sorted(manager.load(tmp_path / "2").signatures) == ["c"]


MISTAKES = {
    "two of one key": (
        [ServingConfig(["a", "b"], [x_spec()]), ServingConfig("a", [x_spec()])],
        "Duplicated key",
    ),
    "no input signature": ([ServingConfig("s")], "sets an `input_signature`"),
    "two inputs": (
        [ServingConfig("s", [x_spec(), x_spec(name="z")])],
        "A method of a JaxModule takes one input",
    ),
}


@pytest.mark.parametrize(("configs", "words"), MISTAKES.values(), ids=MISTAKES)
def test_configs_that_do_not_fit(configs, words, save):
    with refused(ValueError, words):
        save(module(), *configs)


@pytest.mark.parametrize("key", [None, "baz"])
def test_ambiguous_methods_are_refused(key):
    made = JaxModule(
        params(), {"a": linear, "b": linear}, input_polymorphic_shape={"a": None, "b": None}
    )
    with refused(ValueError, "`method_key`", "['a', 'b']", got=repr(key)) as caught:
        ExportManager(made, [ServingConfig("s", [x_spec()], method_key=key)])
    assert caught.value.__notes__ == ["Failed exporting signature_key=s"]


def test_a_config_without_a_key():
    with pytest.raises(ValueError):
        ServingConfig("")


def test_an_input_signature_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="input_signature"):  # TensorFlow's words
        ExportManager(module(), [ServingConfig("s", {"x": x_spec()})])


def test_a_model_whose_ties_end_is_saved_with_both_arrays(tmp_path):
    w = jnp.ones((3, 3))
    made = module(lambda p, x: x @ p["in"] @ p["out"], params={"in": w, "out": w})
    manager = ExportManager(made, [ServingConfig("s", [x_spec()])])
    manager.save(tmp_path / "1")
    made.update_variables({"in": w, "out": 2 * w})
    manager.save(tmp_path / "2")
    found = manager.load(tmp_path / "2").signatures["s"](x=tf.constant(X))["output_0"]
    assert_close(found, X @ w @ (2 * w))


def test_aliases_of_functions_stay(tmp_path):
    made = module()
    manager = ExportManager(made, [ServingConfig("s", [x_spec()])])
    (function,) = made.methods.values()
    options = tf.saved_model.SaveOptions(function_aliases={"the_model": function})
    manager.save(tmp_path / "model", options)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert_close(loaded.signatures["s"](x=tf.constant(X))["output_0"], linear(params(), X))
    from tensorflow.core.protobuf import saved_model_pb2

    stored = saved_model_pb2.SavedModel()
    stored.ParseFromString((tmp_path / "model" / "saved_model.pb").read_bytes())
    (graph,) = stored.meta_graphs
    names = {each.signature.name for each in graph.graph_def.library.function}
    assert names & set(
        graph.meta_info_def.function_aliases
    )  # TensorFlow lists traces that it drops, too
    assert "the_model" in graph.meta_info_def.function_aliases.values()


def test_files_that_killed_saves_left_go_with_the_next(tmp_path, monkeypatch):
    """TensorFlow makes them of functions of its own, for the time of the process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("__autograph_generated_fileabc.py", "mine.py"):
        (folder / name).write_text("")
        os.utime(folder / name, (0, 0))
    ExportManager(module(), [ServingConfig("a", [x_spec()])]).save(tmp_path / "model")
    assert os.listdir(folder) == ["mine.py"]


def test_the_names_that_are_handed_on():
    for name in ("JaxModule", "ExportManager", "ServingConfig"):
        assert getattr(pax_export.export, name) is getattr(pax_export.export.orbax, name)
