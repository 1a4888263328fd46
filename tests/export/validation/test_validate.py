"""Damaged exports are found out, and nothing is left of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pax_export.errors import ValidationError
from pax_export.export import spec, to_saved_model
from pax_export.export.artifact import formats
from pax_export.export.artifact.dimensions import random_array
from pax_export.export.formats.saved_model import writer as saved_model
from pax_export.export.pipeline import run_export
from pax_export.export.validation import serve
from pax_export.export.validation.cases import given_calls
from pax_export.export.validation.validate import Case, compare_results, validate
from tests.closeness import assert_close
from tests.export.models import affine, affine_params
from tests.refusals import refused


def case(**expected):
    return Case("serving_default", {}, expected, label="(n=2)")


def array(values, dtype):
    return np.array(values).astype(dtype)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (array([1, 2, 3], "int32"), array([1, 2, 4], "int32")),
        (array([True, False], "bool"), array([True, True], "bool")),
        (array([1, 2], "uint64"), array([1, 2**60], "uint64")),
        (array([1.0, 2.0], "float32"), array([1.0, np.nan], "float32")),
        (array([1.0, np.nan], "float32"), array([1.0, 2.0], "float32")),
        (array([np.inf, 1.0], "float32"), array([-np.inf, 1.0], "float32")),
        (array([1.0, 2.0], "float32"), array([1.0, 2.001], "float32")),
        (array([1 + 1j], "complex64"), array([1 + 1.01j], "complex64")),
        (array([1.0, 2.0], ml_dtypes.bfloat16), array([1.0, 3.0], ml_dtypes.bfloat16)),
    ],
)
def test_a_wrong_element_is_found(expected, got):
    with refused(ValidationError, where="serving_default (n=2): y") as caught:
        compare_results(case(y=expected), {"y": got})
    assert caught.value.got.startswith("1 of ")


@pytest.mark.parametrize(
    "got",
    [
        {"y": np.ones((2, 1), np.float32)},
        {"y": np.ones((2, 2), np.float64)},
        {"y": np.ones((1, 2), np.float32)},
        {"z": np.ones((2, 2), np.float32)},
    ],
)
def test_another_shape_dtype_or_name_is_found(got):
    with pytest.raises(ValidationError):
        compare_results(case(y=np.ones((2, 2), np.float32)), got)


def test_nan_is_nan_and_rounding_is_no_difference():
    expected = array([np.nan, np.inf, 1.0, 1e-9], "float32")
    got = array([np.nan, np.inf, 1.00001, 2e-9], "float32")
    assert_close(compare_results(case(y=expected), {"y": got})["y"], 1e-5, rtol=0.1)


def shapes(struct):
    """The shapes of an input in the calls of a test."""
    return sorted(inputs["x"].shape for _, inputs, _ in given_calls({"x": struct}))


def test_sizes_differ_and_satisfy_the_constraints():
    a, b = jax.export.symbolic_shape("a, b", constraints=["b >= 20"])
    chosen = shapes(jax.ShapeDtypeStruct((a, 2 * b), jnp.float32))
    assert chosen and all(each[1] >= 40 for each in chosen)
    (n,) = jax.export.symbolic_shape("n")
    assert shapes(jax.ShapeDtypeStruct((n,), jnp.float32)) == [(1,), (2,), (5,)]
    assert shapes(jax.ShapeDtypeStruct((3,), jnp.float32)) == [(3,)]
    assert len(given_calls({})) == 1


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


@pytest.fixture
def damage(monkeypatch):
    """Lets the writer store other weights than the model has."""
    write = saved_model.write

    def damaged(directory, store, *others):
        kept = {variable.name: variable.value for variable in store.variables}
        for variable in store.variables:
            variable.value = variable.value + 0.01
        write(directory, store, *others)
        for variable in store.variables:
            variable.value = kept[variable.name]

    monkeypatch.setattr(saved_model, "write", damaged)


def test_an_export_with_wrong_weights_is_removed(tmp_path, damage):
    with refused(ValidationError, "model's"):
        to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"))
    assert not list(tmp_path.iterdir())


def test_a_refused_export_leaves_the_old_one(tmp_path, monkeypatch):
    to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"), validate=False)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(run_export.ExportRun, "tested", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        to_saved_model((affine_params(), affine), tmp_path / "model", spec("n, 3"), overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("separate", [False, True])
def test_an_export_that_cannot_run(tmp_path, separate):
    with pytest.raises(ValidationError):
        validate(formats.SAVED_MODEL, tmp_path, [case(y=np.ones(2))], separate=separate)


def test_the_report_has_the_largest_error(tmp_path):
    report = to_saved_model(
        (affine_params(), affine), tmp_path / "model", spec("n, 3"), validate="process"
    )
    assert report.validated == "process"
    assert list(report.largest_error) == ["serving_default: output", "serving_default: gradient:x"]
    assert report.largest_error["serving_default: output"] < 1e-5


def test_eigenvectors_of_either_sign_are_right(tmp_path):
    """LAPACK and XLA choose differently; the export does what XLA's algorithm does in jax."""
    model = np.ones((), np.float32), lambda scale, x: jnp.linalg.eigh(x * scale)
    report = to_saved_model(model, tmp_path / "model", spec("n, 4, 4"), trainable=True)
    assert max(report.largest_error.values()) < 1e-3
