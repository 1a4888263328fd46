"""The small functions that orbax's programs call."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import pax_export.export
from pax_export.errors import ExportPathError
from pax_export.export import orbax
from pax_export.export.orbax import utils
from pax_export.export.orbax.config import bool_env, config, obx_export_tf_preprocess_only
from tests.closeness import assert_close
from tests.export.orbax.models import KEY, X, linear, module, params, x_spec
from tests.refusals import refused

ONE = tf.TensorSpec([None], tf.int32, name="one")
TWO = utils.TensorSpecWithDefault(tf.TensorSpec([None], tf.int32, name="two"), [7])


def test_the_names_that_are_handed_on():
    for name in ("JaxModule", "ExportManager", "ServingConfig"):
        assert getattr(pax_export.export, name) is getattr(orbax, name)


def test_defaults_of_arguments():
    spec = utils.TensorSpecWithDefault(tf.TensorSpec([2], tf.float32), [1.0, 2.0])
    assert spec.default_val.dtype == tf.float32
    function = utils.with_default_args(lambda a, b: a + b["k"], [tf.TensorSpec([2]), {"k": spec}])
    assert_close(function(tf.ones(2)), [2, 3])
    assert_close(function(tf.ones(2), {"k": tf.ones(2)}), [2, 2])
    plain = utils.remove_signature_defaults([{"k": spec}])
    assert plain == [{"k": spec.tensor_spec}]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: utils.TensorSpecWithDefault(ONE, None), "Use TensorSpec if no defaults"),
        (lambda: utils.TensorSpecWithDefault(ONE, [[1]]), "not compatible with the default value"),
        (
            lambda: utils.with_default_args(lambda a: a, [[ONE, TWO]]),
            "TensorSpecWithDefault must be defined for each tensor",
        ),
        (lambda: utils.make_auto_batching_function([TWO]), "No primary input tensors"),
    ],
)
def test_defaults_that_do_not_fit(make, words):
    with refused(ValueError, words):
        make()


def test_batches_are_made_alike():
    function = utils.make_auto_batching_function([ONE, {"two": TWO}])
    one, two = function(tf.constant([1, 2, 3]))
    assert one.numpy().tolist() == [1, 2, 3]
    assert two["two"].numpy().tolist() == [7, 7, 7]
    _, two = function(tf.constant([1, 2]), {"two": tf.constant([5, 6])})
    assert two["two"].numpy().tolist() == [5, 6]
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(tf.constant([1, 2, 3]), {"two": tf.constant([5, 6])})


def test_primary_inputs_have_one_batch():
    both = utils.TensorSpecWithDefault(
        tf.TensorSpec([None], tf.int32, name="two"), [7], is_primary=True
    )
    function = utils.make_auto_batching_function([ONE, both])
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(tf.constant([1, 2]))


def test_a_whole_signature_as_one_function():
    serving = orbax.ServingConfig("s", [x_spec()], lambda x: x + 1, lambda y: {"y": y})
    function = utils.make_e2e_inference_fn(module().methods[KEY], serving)
    assert_close(function(X)["y"], linear(params(), X + 1))


def test_bfloat16_inside():
    seen = []

    def apply(params, x):
        seen.append((params["w"].dtype, x.dtype))
        return {"y": linear(params, x), "n": jnp.argmax(x, -1)}

    found = module(utils.with_bfloat16(apply)).methods[KEY](X)
    assert seen == [(jnp.bfloat16, jnp.bfloat16)]
    assert (found["y"].dtype, found["n"].dtype) == (tf.float32, tf.int32)
    assert_close(found["y"], linear(params(), X), rtol=1e-2)


def test_bfloat16_of_one_side_only():
    double = utils.with_bfloat16(lambda x: 2 * x, outputs=False)
    assert double(tf.ones(2)).dtype == tf.bfloat16
    same = utils.with_bfloat16(lambda x: x, inputs=False)
    assert same(tf.ones(2, tf.bfloat16)).dtype == tf.float32
    assert utils.with_bfloat16(lambda x: x)(np.ones(2, np.float64)).dtype == np.float64


def test_a_pytree_in_bfloat16():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    tree = {
        "array": jnp.ones(2), "numpy": np.ones(2), "tensor": tf.ones(2), "struct": struct,
        "number": 0.1, "scalar": np.float64(0.1), "half": jnp.ones(2, jnp.float16),
    }  # fmt: skip
    found = utils.to_bfloat16(tree)
    assert {name: leaf.dtype.name for name, leaf in found.items()} == dict.fromkeys(
        tree, "bfloat16"
    )
    assert isinstance(found["struct"], jax.ShapeDtypeStruct) and tf.is_tensor(found["tensor"])
    assert isinstance(found["number"], jax.Array)
    assert float(found["number"]) == float(found["scalar"]) == float(jnp.bfloat16(0.1))


def test_integers_are_not_cast():
    key, text = jax.random.key(0), tf.constant(["a"])
    tree = [3, True, None, "text", np.arange(2), text, key, np.ones(1, complex)]
    for old, new in zip(tree, utils.to_bfloat16(tree)):
        assert new is old


def test_exported_functions_in_a_directory(tmp_path):
    exported = module().obm_module_to_jax_exported_map(jnp.asarray(X))
    utils.save_jax_exported_map(str(tmp_path / "functions"), exported)
    loaded = utils.load_jax_exported_map(str(tmp_path / "functions"))
    assert list(loaded) == [KEY]
    assert_close(loaded[KEY].call(params(), X), linear(params(), X))
    with pytest.raises(ValueError):
        utils.save_jax_exported_map(tmp_path / "functions", exported)


def test_missing_exported_functions_are_refused(tmp_path):
    with refused(ValueError, "none"):
        utils.load_jax_exported_map(tmp_path / "none")
    with refused(ValueError, ".jax_exported"):
        utils.load_jax_exported_map(tmp_path)
    (tmp_path / "bad.jax_exported").write_bytes(b"bad")
    with pytest.raises(ExportPathError):
        utils.load_jax_exported_map(tmp_path)


def test_platforms():
    assert utils.get_lowering_platforms({}) is None
    both = ["cpu", "tpu"]
    assert utils.get_lowering_platforms({"native_serialization_platforms": both}) == both
    with refused(ValueError, "Platform"):
        utils.get_lowering_platforms({"native_serialization_platforms": ["abacus"]})


def test_a_tree_of_variables():
    tree = jax.tree_util.tree_structure({"a": 0, "b": [0]})
    assert utils.get_variable_tree(tree, [1, 2]) == {"a": 1, "b": [2]}


def test_options(monkeypatch):
    name, within = "obx_export_tf_preprocess_only", obx_export_tf_preprocess_only
    monkeypatch.setattr(config, "_values", {})
    assert getattr(config, name) is False
    monkeypatch.setenv(name.upper(), "yes")
    assert getattr(config, name) is True
    config.update(name, False)
    assert getattr(config, name) is config.read(name) is False
    with within(True):
        assert getattr(config, name) is True
        with within(False):
            assert getattr(config, name) is False
        seen = []
        other = threading.Thread(target=lambda: seen.append(getattr(config, name)))
        other.start()
        other.join()
        assert seen == [False]  # a block is for its thread
    assert getattr(config, name) is False


def test_options_that_do_not_exist(monkeypatch):
    for call in (lambda: config.read("none"), lambda: config.update("none", True)):
        with refused(AttributeError, "none"):
            call()
    monkeypatch.setenv("A_FLAG", "perhaps")
    with refused(ValueError, "'perhaps'"):
        bool_env("A_FLAG", True)
