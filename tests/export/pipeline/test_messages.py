"""Mistakes whose message used to lead elsewhere."""

import copy
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import (
    InvalidArgumentTypeError,
    SymbolicDimensionError,
    TracedValueError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export.export import spec, to_saved_model, to_tflite
from pax_export.export.formats.tflite import export as tflite_export
from tests.export.models import affine, affine_params
from tests.refusals import fields


def refused(kind, *arguments, export=to_saved_model, **options):
    with pytest.raises(kind) as caught:
        export(*arguments, **options)
    return caught.value


# --- a shape in the place of a spec ------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ((None, None, 8), "(None, None, 8)"),
        (("batch", 8), "('batch', 8)"),
        ("batch, 8", "'batch, 8'"),
        ((2, 8), "(2, 8)"),
    ],
)
def test_a_shape_is_no_description_of_an_input(tmp_path, inputs, meant):
    error = refused(InvalidArgumentTypeError, pax.Linear(8, 2), tmp_path / "m", inputs)
    assert error == fields(got=f"inputs={meant}", write=f"spec({meant})")
    assert not list(tmp_path.iterdir())


def test_numbers_and_none_are_arguments_where_the_model_takes_them(tmp_path):
    def shift(params, x, mask, by):
        assert mask is None
        return x + by

    to_saved_model(({}, shift), tmp_path / "m", (2.0, None, 3), validate=False)
    refused(ValueError, ({}, shift), tmp_path / "n", (spec("n"), None))


# --- a value that there is none of -------------------------------------------------------


def branches(params, x):
    if x.sum() > 0:  # the line that a message must name
        return x
    return -x


def counts(params, x):
    return jnp.arange(int(x[0]))


def leaves_jax(params, x):
    return np.tanh(np.asarray(x))


@pytest.mark.parametrize(
    ("function", "line"), [(branches, 1), (counts, 1), (leaves_jax, 1)], ids=lambda x: str(x)[:20]
)
@pytest.mark.parametrize("shape", ["3", "n"])
def test_a_value_in_python_names_the_line_of_the_user(tmp_path, function, line, shape):
    error = refused(TracedValueError, ({}, function), tmp_path / "m", spec(shape))

    assert error.where == f"test_messages.py:{function.__code__.co_firstlineno + line}"
    assert error.write.startswith("jax.numpy.where or jax.lax.cond")
    assert isinstance(error, TypeError)  # as jax's own is
    assert "programs.py" not in str(error)


class Branching(pax.Module):
    def __call__(self, x):
        return x if x.sum() > 0 else -x


def test_a_value_in_a_layer_names_the_layer(tmp_path):
    net = pax.Sequential(pax.Linear(3, 2), Branching())
    error = refused(TracedValueError, net, tmp_path / "m", spec("n, 3"))
    assert error.where.startswith("modules.1: Branching (test_messages.py:")


# --- weights that are no numbers ---------------------------------------------------------


def test_nonfinite_weights_serve_as_in_jax(tmp_path):
    params = affine_params()
    params["w"][0, 2] = np.nan

    def largest(params, x):
        return jnp.argmax(affine(params, x), axis=-1)

    report = to_tflite((params, largest), tmp_path / "m.tflite", spec("2, 3"))
    assert report.largest_error["serving_default: output"] == 0


def test_nonfinite_weights_are_named(tmp_path, monkeypatch):
    """Where a runtime makes something else of them, as none is known to do now."""
    params = affine_params()
    params["w"][0, 2] = np.nan
    largest = affine
    weights = tflite_export.Weights

    def damaged(store):
        other = copy.copy(store)
        other.variables = [
            dataclasses.replace(v, value=np.nan_to_num(v.value)) for v in store.variables
        ]
        return weights(other)

    monkeypatch.setattr(tflite_export, "Weights", damaged)
    error = refused(
        ValidationError, (params, largest), tmp_path / "m.tflite", spec("2, 3"), export=to_tflite
    )
    assert error.where == "w"
    assert error.write.startswith("finite weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_weights_are_not_quantized(tmp_path, value):
    """With infinity the converter of TensorFlow 2.21 ends the process."""
    error = refused(
        UnsupportedOperationError,
        ({"w": np.full((64, 64), value, np.float32)}, lambda params, x: x @ params["w"]),
        tmp_path / "m.tflite", spec("1, 64"), quantize="dynamic", export=to_tflite,
    )  # fmt: skip
    assert error.where == "w"
    assert not list(tmp_path.iterdir())


def test_the_users_line_comes_before_one_of_a_library(tmp_path):
    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="ema")

    def normalized(both, x):
        norm = jax.vmap(both[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return norm(x, both[1])[0]

    error = refused(
        SymbolicDimensionError, ((net, state), normalized), tmp_path / "m", spec("b, 3")
    )
    line = normalized.__code__.co_firstlineno + 2
    assert error.where.startswith(f"test_messages.py:{line}, in _batch_norm.py:")
