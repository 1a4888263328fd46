"""An argument of another kind than an exporter takes is named, and nothing is written."""

from __future__ import annotations

import numpy as np
import pytest

from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.export.models import affine, affine_params

MODEL = affine_params(), affine
EXPORTERS = {
    "saved_model": to_saved_model,
    "stablehlo": to_stablehlo,
    "onnx": to_onnx,
    "tflite": to_tflite,
}
#: What is wrong of an argument that every exporter takes, and how the refusal begins.
WRONG = [
    ("methods", 5, "The methods of a model stand in a dict"),
    ("methods", ["predict"], "The methods of a model stand in a dict"),
    ("methods", {1: "__call__"}, "The methods of a model stand in a dict"),
    ("kwargs", 5, "The inputs that a model takes by name stand in a dict"),
    ("kwargs", [1], "The inputs that a model takes by name stand in a dict"),
    ("kwargs", {1: 2}, "The inputs that a model takes by name stand in a dict"),
    ("constraints", None, "`constraints` is a text, or several."),
    ("constraints", 5, "`constraints` is a text, or several."),
    ("constraints", [1], "`constraints` is a text, or several."),
    ("examples", 5, "The examples of an export are calls."),
]


def refused(tmp_path, argument, value, export, start=""):
    with pytest.raises(InvalidArgumentTypeError) as caught:
        export(MODEL, tmp_path / "model", spec("batch, 3"), **{argument: value})
    assert not list(tmp_path.iterdir())
    error = caught.value
    assert error.what.startswith(start)
    assert error.where.startswith(argument)
    assert error.got == repr(value)
    assert error.write
    return error


@pytest.mark.parametrize("format", EXPORTERS)
@pytest.mark.parametrize("argument, value, start", WRONG)
def test_what_every_exporter_takes(tmp_path, format, argument, value, start):
    refused(tmp_path, argument, value, EXPORTERS[format], start)


@pytest.mark.parametrize("export", [to_saved_model, to_stablehlo])
@pytest.mark.parametrize("value", [None, 5, [None]])
def test_platforms(tmp_path, export, value):
    error = refused(tmp_path, "platforms", value, export, "`platforms` is a text, or several.")
    assert error.write == 'platforms=("cpu", "cuda")'


@pytest.mark.parametrize("value", [None, "platform", [1]])
def test_disabled_checks(tmp_path, value):
    error = refused(tmp_path, "disabled_checks", value, to_stablehlo)
    assert error.write == "disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)]"


@pytest.mark.parametrize("value", [None, 5, 1.5])
def test_trainable(tmp_path, value):
    error = refused(tmp_path, "trainable", value, to_saved_model)
    assert error.write == "trainable=True, False, or paths of leaves: some of b, w"


@pytest.mark.parametrize("argument", ["preprocess", "postprocess"])
@pytest.mark.parametrize("value", [5, "scale", [len]])
def test_processors(tmp_path, argument, value):
    error = refused(tmp_path, argument, value, to_saved_model)
    assert error.where == f"{argument} of serving_default"


def test_a_constraint_alone_is_one(tmp_path):
    report = to_stablehlo(
        MODEL, tmp_path / "model", spec("batch, 3"), constraints="batch >= 2", validate=False
    )
    assert report.signatures["serving_default"].constraints == ("batch >= 2",)


def test_an_array_is_none_of_a_few_words(tmp_path):
    with pytest.raises(InvalidArgumentError, match="validate has a value that means"):
        to_stablehlo(MODEL, tmp_path / "model", spec("batch, 3"), validate=np.zeros(2))
