"""Damaged exports are found out, and nothing is left of them."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.lax.linalg import lu_pivots_to_permutation

import pax_export as pax
from pax_export.errors import UnsupportedOperationError, ValidationError
from pax_export.export import spec, to_onnx, to_tflite
from pax_export.export.artifact.dimensions import random_array
from pax_export.export.formats.saved_model import SAVED_MODEL
from pax_export.export.validation import serve
from pax_export.export.validation.recheck import Rechecked
from pax_export.export.validation.validate import Case, compare_either, compare_results, validate
from tests.closeness import assert_close


def case(**expected):
    return Case("serving_default", {}, expected, label="(n=2)")


def array(values, dtype):
    return np.array(values).astype(dtype)


def test_nan_is_nan_and_rounding_is_no_difference():
    expected = array([np.nan, np.inf, 1.0, 1e-9], "float32")
    got = array([np.nan, np.inf, 1.00001, 2e-9], "float32")
    assert_close(compare_results(case(y=expected), {"y": got})["y"], 1e-5, rtol=0.1)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "complex64"])
def test_random_inputs_vary(dtype):
    values = random_array((100,), jnp.dtype(dtype), np.random.default_rng(0))
    assert values.dtype == dtype
    assert len(set(values.tolist())) > 1


def test_arrays_travel_between_processes(tmp_path):
    arrays = {
        "a": np.arange(6).reshape(2, 3),
        "b": np.ones((), ml_dtypes.bfloat16),
        "c": np.zeros((0, 2), bool),
        "text": np.array([["the", "fox"]]).astype("S").astype(object),
    }
    serve.save(tmp_path / "file.npz", [{"signature": "f", "inputs": arrays}, {"inputs": {}}])
    first, second = serve.load(tmp_path / "file.npz")
    assert first["signature"] == "f"
    assert second == {"inputs": {}}
    for name, value in arrays.items():
        assert first["inputs"][name].dtype == value.dtype
        np.testing.assert_array_equal(first["inputs"][name], value)


@pytest.mark.parametrize("separate", [False, True])
def test_an_export_that_cannot_run(tmp_path, separate):
    with pytest.raises(ValidationError):
        validate(SAVED_MODEL, tmp_path, [case(y=np.ones(2))], separate=separate)


def test_an_example_that_is_no_number_is_named_as_a_reason():
    case = Case("f", {"x": np.float32([1, np.inf])}, {"y": np.zeros(2, np.float32)})
    with pytest.raises(ValidationError) as caught:
        compare_either(case, {"y": np.ones(2, np.float32)})
    assert caught.value.write.startswith("an example without NaN and infinity: of these, decomp")


def _pairs(x):
    return jax.lax.sort((x, jnp.arange(x.size)), num_keys=1, is_stable=False)


UNDEFINED = {
    "ties": (_pairs, spec("60", "int32")),
    "pivots beyond the matrix": (
        partial(lu_pivots_to_permutation, permutation_size=3),
        spec("3", "int32"),
    ),
}


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
@pytest.mark.parametrize("name", UNDEFINED)
def test_what_jax_leaves_open_is_no_difference(write, name, tmp_path):
    function, inputs = UNDEFINED[name]
    assert write(function, tmp_path / f"net.{write.__name__[3:]}", inputs).validated == "here"


def test_an_operation_without_a_line_of_the_model_is_at_the_call(tmp_path):
    with pytest.raises(UnsupportedOperationError) as caught:
        to_onnx(jax.lax.linalg.schur, tmp_path / "net.onnx", spec("3, 3"))
    assert caught.value.where.startswith("test_validate.py:")


def test_a_loop_that_does_not_end_for_random_inputs_is_named(tmp_path, monkeypatch):
    def count(x):
        return jax.lax.while_loop(lambda n: n < 5, lambda n: n + x.mean().astype(int), 0)

    monkeypatch.setattr("pax_export.export.validation.endless_loops._PATIENCE", 0.5)
    with pytest.raises(ValidationError, match="does not end") as caught:
        to_onnx(count, tmp_path / "net.onnx", spec("3"))
    assert caught.value.where.startswith("test_validate.py:")
    assert caught.value.write.startswith("examples=[...]")
    assert to_onnx(count, tmp_path / "net.onnx", spec("3"), examples=[np.ones(3)]).validated


def test_a_loop_that_ends_is_validated(tmp_path):
    def halve(x):
        halved = partial(jax.lax.while_loop, lambda v: v > 1e-3, lambda v: v / 2)
        return jax.vmap(halved)(jnp.abs(x[0]))

    assert to_onnx(halve, tmp_path / "net.onnx", spec("n, 3")).validated == "here"


# --- the sizes with which an export is called are sizes that the model can take ---


windows = pax.Sequential(
    pax.Conv2D(3, 4, 3, padding="VALID", rng_key=jax.random.key_data(jax.random.key(0))),
    lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    lambda x: x.mean((1, 2)),
)
MODELS = {
    "windows": (windows, "b, h, w, 3", 3),
    "a mean of the rest": (lambda x: x[:, 7:].mean(1), "b, t", 7),
    "halves": (lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2).mean(3), "h, w", 1),
}


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
@pytest.mark.parametrize("name", MODELS)
def test_no_array_of_the_model_is_empty(write, name, tmp_path):
    model, shape, smallest = MODELS[name]
    path = tmp_path / f"net.{write.__name__[3:]}"
    report = write(model, path, spec(shape), card=False)
    (info,) = report.signatures.values()
    assert len(info.sizes) == 3
    assert all(size > smallest for each in info.sizes for key, size in each.items() if key != "b")
    assert not any(check.problem for check in Rechecked(path).checks)
