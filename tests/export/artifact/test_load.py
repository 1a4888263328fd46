import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import ExportPathError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import (
    Report,
    load,
    spec,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
)
from tests.closeness import assert_close
from tests.export.models import Net, affine, affine_params, random
from tests.refusals import refused


def test_arrays_come_back_as_they_went_in(export):
    import tensorflow as tf

    loaded, _ = export((affine_params(), affine), spec("n, 3"))
    x = random(2, 3)
    assert type(loaded(x)) is np.ndarray
    assert isinstance(loaded(jnp.asarray(x)), jax.Array)
    assert tf.is_tensor(loaded(tf.constant(x)))
    assert type(loaded(x.tolist())) is np.ndarray
    assert loaded(x=x).shape == (2, 4)


def test_a_loaded_model_can_stand_in_a_tensorflow_function(export):
    import tensorflow as tf

    loaded, _ = export((affine_params(), affine), spec("n, 3"))
    function = tf.function(lambda x: 2 * loaded(x), jit_compile=True)
    expected = 2 * affine(affine_params(), random(2, 3))
    assert_close(function(tf.constant(random(2, 3))), expected, rtol=1e-5)
    assert tf.function(lambda: loaded(random(2, 3)))().shape == (2, 4)  # arguments of numpy


def test_numbers_are_not_changed_on_the_way_in(export):
    loaded, _ = export(({}, lambda p, i: i + 1), spec("n", "int32"))
    assert loaded(np.array([3], np.int64)).tolist() == [4]
    with refused(InvalidArgumentTypeError, got="int64", write="int32"):
        loaded(np.array([2**40 + 5]))
    with pytest.raises(InvalidArgumentTypeError):
        loaded(np.array([1.5], np.float32))


@pytest.mark.parametrize("given", [[1.5], [300], ["1"], "text", None, {"a": 1}, [[1], 2], [1j]])
def test_python_values_that_an_input_does_not_hold_are_refused(export, given):
    loaded, _ = export(({}, lambda p, i: i), spec("n", "uint8"))
    assert loaded([3]).tolist() == [3] and loaded([True]).tolist() == [1]
    with pytest.raises((InvalidArgumentError, InvalidArgumentTypeError)) as caught:
        loaded(given)
    assert caught.value.where == "serving_default: i" and "uint8" in caught.value.write


def test_positions_are_those_of_the_function(export):
    loaded, _ = export(({}, lambda p, z, a: z - 2 * a), (spec("n"), spec("n")))
    one, three = np.ones(2, np.float32), np.full(2, 3, np.float32)
    assert loaded(three, one).tolist() == [1.0, 1.0]
    assert loaded(a=one, z=three).tolist() == [1.0, 1.0]
    assert loaded(three, a=one).tolist() == [1.0, 1.0]


def test_other_arguments_are_refused(export):
    loaded, _ = export(({}, lambda p, x, y: x + y), (spec("n"), spec("n")))
    with refused(InvalidArgumentError, write="model(x, y)"):
        loaded(np.ones(2))
    with pytest.raises(InvalidArgumentError):
        loaded(np.ones(2), np.ones(2), np.ones(2))


def test_without_a_default_a_signature_must_be_named(export):
    loaded, _ = export(
        Net(), {"one": spec("n, 3"), "two": spec("n, 3")},
        methods={"one": "__call__", "two": "__call__"},
    )  # fmt: skip
    with refused(InvalidArgumentError, write="model.signatures['one'](...)"):
        loaded(random(2, 3))
    one = {"methods": {"one": "__call__"}, "overwrite": True}
    loaded, _ = export(Net(), {"one": spec("n, 3")}, **one)
    assert loaded(random(2, 3)).shape == (2, 4)  # the only one is the default


def test_the_report_is_read_back_as_it_was(export, tmp_path):
    loaded, report = export((affine_params(), affine), spec("n, 3"), validate=True)
    assert isinstance(loaded.report, Report)
    assert loaded.report == report
    assert "runs in     TensorFlow 2.15 and newer" in str(report)
    assert "x: float32[n, 3]" in str(report)
    info = dataclasses.replace(report.signatures["serving_default"], assigns=tuple("abcdefghij"))
    many = dataclasses.replace(report, signatures={"serving_default": info})
    assert "sets 10 variables" in str(many)


def test_there_is_no_export(tmp_path):
    with refused(ExportPathError, where=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize("file", ["saved_model.pb", "variables", "pax_export.json"])
def test_damaged_exports_are_explained(export, tmp_path, file):
    export((affine_params(), affine), spec("n, 3"))
    (tmp_path / "model" / "SHA256SUMS").unlink()  # the earliest exports have none
    place = tmp_path / "model" / file
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
    with pytest.raises(ExportPathError):
        load(tmp_path / "model")


def test_a_report_of_the_future_is_refused(export, tmp_path):
    export((affine_params(), affine), spec("n, 3"))
    file = tmp_path / "model" / "pax_export.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ExportPathError):
        load(tmp_path / "model")


def test_the_saved_model_itself_names_its_inputs(export, tmp_path):
    import tensorflow as tf

    export(({}, lambda p, x, mask: {"a": x, "b": mask}), (spec("batch, 3"), spec("batch")))
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    with refused(tf.errors.InvalidArgumentError, "mask.shape[0] is not batch", "[3] [2]"):
        served(x=tf.ones((2, 3)), mask=tf.ones(3))


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize(
    "to, suffix",
    [(to_saved_model, ""), (to_stablehlo, ""), (to_tflite, ".tflite"), (to_onnx, ".onnx")],
)
def test_keys_and_nodes_without_paths_are_arguments(tmp_path, to, suffix):
    def noise(key, box, partial):
        return partial(box.a) + jax.random.normal(key, (2,))

    x, add = np.ones(2, np.float32), jax.tree_util.Partial
    key = jax.eval_shape(lambda: jax.random.key(0))
    inputs = key, Box(spec("2"), None), add(jnp.add, spec("2"))
    to(noise, tmp_path / f"m{suffix}", inputs, card=False)
    loaded, key = load(tmp_path / f"m{suffix}"), jax.random.key(7)
    found, expected = (f(key, Box(x, None), add(jnp.add, x)) for f in (loaded, noise))
    assert_close(found, expected, rtol=1e-4)
    with pytest.raises(InvalidArgumentError):
        loaded(key, Box(x, x), add(jnp.add, x))
