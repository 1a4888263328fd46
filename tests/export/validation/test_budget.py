"""What the default validation costs, and what it leaves out to keep to that."""

import jax
import pytest

import pax_export as pax
from pax_export.errors import NotValidatedWarning, ValidationError
from pax_export.export import Report, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.formats.saved_model import writer as saved_model
from pax_export.export.formats.stablehlo import functions
from pax_export.export.pipeline import phases
from pax_export.export.validation import certify, model_cases, recheck
from tests.export.models import affine, affine_params
from tests.refusals import refused

MODEL = (affine_params(), affine)
FORMATS = [(to_saved_model, "m"), (to_stablehlo, "m"), (to_onnx, "m.onnx")]
ALL = [
    "serving_default with numbers up to 1e4",
    "the gradients of serving_default",
    "serving_default (n=5)",
    "serving_default (n=1)",
]


def left_out(report):
    """Without the call in a session, which brief calls make whatever the time."""
    return [text for text in report.left_out if not text.endswith("in a session")]


@pytest.fixture
def no_time(monkeypatch):
    """As for a model that takes minutes to compile."""
    monkeypatch.setattr(model_cases, "_SMALL", 0)
    monkeypatch.setattr(phases, "SPARE", -1e6)


@pytest.mark.parametrize(("to", "name"), [*FORMATS, (to_tflite, "m.tflite")])
def test_of_a_small_model_everything_is_tested(tmp_path, monkeypatch, to, name):
    monkeypatch.setattr(phases, "SPARE", -1e6)  # on however slow a machine
    report = to(MODEL, tmp_path / name, spec("n, 3"))
    assert report.left_out == () and "left out" not in str(report)
    assert to is not to_saved_model or "serving_default: gradient:x" in report.largest_error


def test_without_budget_one_call_is_made_and_reported(tmp_path, no_time):
    report = to_saved_model(MODEL, tmp_path / "m", spec("n, 3"))
    assert report.validated == "here"
    assert left_out(report) == ALL
    assert list(report.largest_error) == ["serving_default: output"]
    for text in ALL:
        assert f"\n  left out    {text}\n" in str(report)
    assert Report.read(tmp_path / "m") == report


def test_of_a_bundle_that_takes_long_gradients_are_left_out(tmp_path, no_time, monkeypatch):
    monkeypatch.setattr(functions, "_SMALL", 0)
    report = to_stablehlo(MODEL, tmp_path / "m", spec("n, 3"), vjp_order=1)
    assert left_out(report) == ALL
    assert list(report.largest_error) == ["serving_default: output"]
    report = to_stablehlo(MODEL, tmp_path / "n", spec("n, 3"), vjp_order=1, validate="full")
    assert (report.validated, report.left_out) == ("here", ())
    assert "serving_default: gradient:x" in report.largest_error


def test_a_full_test_leaves_nothing_out(tmp_path, no_time):
    report = to_saved_model(MODEL, tmp_path / "m", spec("n, 3"), validate="full")
    assert report.left_out == ()
    assert "serving_default: gradient:x" in report.largest_error
    assert report.validated == "here"


def test_each_signature_is_called_at_least_once(tmp_path, no_time, monkeypatch):
    methods = {"a": affine, "b": lambda p, x: -affine(p, x)}
    inputs = dict.fromkeys(methods, spec("n, 3"))
    report = to_saved_model(MODEL, tmp_path / "m", inputs, methods=methods)
    assert list(report.largest_error) == ["a: output", "b: output"]
    assert "the gradients of a" in report.left_out
    assert "the gradients of b" in report.left_out
    write = saved_model.write

    def damaged(directory, store, signatures, initializer):
        write(directory, store, (signatures[0], signatures[0]), initializer)

    monkeypatch.setattr(saved_model, "write", damaged)
    with pytest.raises((ValidationError, KeyError)):
        to_saved_model(MODEL, tmp_path / "n", inputs, methods=methods)


@pytest.mark.parametrize(("to", "name"), FORMATS)
def test_a_size_that_jax_itself_refuses_is_no_failure_of_the_export(tmp_path, to, name):
    def pairs(params, x):
        if isinstance(x.shape[0], int) and x.shape[0] < 2:
            raise ValueError("two rows at least")
        return x * 2

    report = to(({}, pairs), tmp_path / name, spec("n, 3"))
    assert report.left_out == (
        "serving_default (n=1), which jax refuses: ValueError: two rows at least",
    )

    def never(params, x):
        if isinstance(x.shape[0], int):
            raise ValueError("no number will do")
        return x * 2

    with refused(ValidationError, "examples=[...]", got="ValueError: no number will do"):
        to(({}, never), tmp_path / f"n{name}", spec("n, 3"))


def test_of_many_equal_layers_it_keeps_its_time(tmp_path, monkeypatch):
    """Their bytes are few, since each kind of layer stands there once."""
    monkeypatch.setattr(phases, "SPARE", -1e6)
    net = pax.Sequential(*[layer for _ in range(40) for layer in (pax.Linear(3, 3), jax.nn.relu)])
    report = to_saved_model(net, tmp_path / "m", spec("n, 3"))
    assert left_out(report) == ALL


@pytest.mark.parametrize(("to", "name"), FORMATS)
def test_sizes_are_drawn_that_leave_something_to_compare(tmp_path, to, name):
    model = ({}, lambda _, x: 2 * x[:, 4000:])
    report = to(model, tmp_path / name, spec("batch, samples"), constraints=("samples >= 256",))
    assert report.validated == "here"
    assert "serving_default: output" in report.largest_error


def test_a_test_in_which_every_output_is_empty_is_none(tmp_path):
    with pytest.warns(NotValidatedWarning, match="no call was found"):
        report = to_onnx(({}, lambda _, x: x[:, 3:]), tmp_path / "m.onnx", spec("n, 3"))
    assert (
        "It was not: serving_default: no call was found" in (tmp_path / "m.onnx.html").read_text()
    )
    assert (report.validated, report.largest_error) == (None, {})
    assert report.left_out == (
        "serving_default: no call was found that gives an element to compare",
    )
    assert "validated   no\n" in str(report)
    found = recheck.Rechecked(tmp_path / "m.onnx")
    assert {str(each).partition(",")[0].split(": ")[1] for each in found.checks} == {
        "no element to compare"
    }
    (result,) = certify.certify(tmp_path / "m.onnx", runtimes=["onnxruntime"])
    assert (result.calls, "no call was found" in result.problem) == (0, True)


def test_signatures_without_an_element_are_named(tmp_path):
    methods = {"serving_default": lambda _, x: 2 * x, "empty": lambda _, x: x[:, 3:]}
    inputs = dict.fromkeys(methods, spec("n, 3"))
    report = to_stablehlo(({}, methods["empty"]), tmp_path / "m", inputs, methods=methods)
    assert (report.validated, report.untested) == ("here", ("empty",))
    assert "validated   in this process, without empty\n" in str(report)
    assert "No call of empty was found" in (tmp_path / "m" / "pax_export.html").read_text()
