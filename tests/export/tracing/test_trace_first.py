"""What a trace finds out is said before anything slow is loaded."""

import sys
from functools import partial

import pytest

from pax_export.errors import MissingPackageError, NotDifferentiableError, StateChangeError
from pax_export.export import spec, to_onnx, to_saved_model, to_tflite
from pax_export.export.formats.saved_model import export as saved_model
from tests.export.models import Counter, affine, affine_params
from tests.refusals import refused


def slow(*_):
    raise AssertionError("TensorFlow was loaded")


@pytest.fixture(autouse=True)
def no_tensorflow(monkeypatch):
    monkeypatch.setattr(saved_model, "tensorflow", slow)


@pytest.mark.parametrize("export", [to_saved_model, to_tflite, to_onnx])
def test_a_model_that_cannot_be_traced_loads_nothing(tmp_path, export):
    with refused(TypeError, "contracting dimensions"):
        export((affine_params(), affine), tmp_path / "m", spec("n, 5"))
    with refused(StateChangeError, "steps"):
        export(Counter(), tmp_path / "m", spec("n"))


def test_nor_does_one_without_the_gradient_that_was_asked_for(tmp_path):
    with pytest.raises(NotDifferentiableError):
        to_saved_model(({}, lambda p, n: n), tmp_path / "m", spec("k", "int32"), vjp_order=1)


FULL = partial(to_saved_model, validate="full")
TEXT = partial(to_saved_model, preprocess=slow, preprocess_inputs=spec("n"), validate=False)


@pytest.mark.parametrize(
    ("export", "package"), [(FULL, "tensorflow"), (TEXT, "tensorflow"), (to_tflite, "flatbuffers")]
)
def test_missing_packages_are_named_before_any_work(tmp_path, monkeypatch, export, package):
    def trace(*_):
        raise AssertionError("it was traced")

    monkeypatch.setitem(sys.modules, package, None)
    with refused(MissingPackageError, f"'{package}'"):
        export(({}, trace), tmp_path / "m", spec("n"))
