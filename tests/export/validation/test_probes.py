"""Inputs far from those that a test draws: what differs there is listed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import ValidationError
from pax_export.export import Report, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.formats.onnx import export as onnx_export
from pax_export.export.formats.onnx.graph import RULES as onnx_rules
from pax_export.export.pipeline import phases
from pax_export.export.portable import Rule
from pax_export.export.validation import cases, probes
from pax_export.export.validation.probes import may_not_end
from tests.refusals import refused


@pytest.fixture(autouse=True)
def time_for_all_calls(monkeypatch):
    """No call is left out on a slow machine."""
    monkeypatch.setattr(phases, "SPARE", 1e6)


SINE = ({}, lambda _, x: {"sin": jnp.sin(x), "double": 2 * x})


def test_what_differs_for_large_numbers_is_listed(tmp_path):
    path = tmp_path / "m.tflite"
    report = to_tflite(SINE, path, spec("4"), validate="full")
    text, of_nan = report.differs
    assert re.fullmatch(
        r"differs from jax at: sin in \S+ .*\(serving_default: sin where x is 1e\+10, .*\)", text
    )
    assert re.fullmatch(
        r"differs from jax in NaN alone at: sin in \S+ .*\(serving_default: sin where .*\)",
        of_nan,
    )
    assert f"  differs     {text.removeprefix('differs ')}\n" in str(report)
    assert Report.read(path) == report


@pytest.mark.parametrize("case", ["nan", "inf", "1e+20", "an index"])
def test_one_kind_of_number_is_found(tmp_path, monkeypatch, case):
    """An export of another function, which is right for ordinary numbers."""
    wrong = {
        "nan": lambda x: jnp.where(jnp.isnan(x), 0, x),
        "inf": lambda x: jnp.where(x == jnp.inf, 0, x),
        "1e+20": lambda x: jnp.where(x > 1e15, 0, x),
        "an index": lambda x: jnp.where(x < -(2**30), 0, x),
    }[case]
    converted = onnx_export.converted

    def of_wrong(program, *rest):
        other = to_trace(wrong, program)
        return converted(other, *rest)

    monkeypatch.setattr(onnx_export, "converted", of_wrong)
    dtype = "int32" if case == "an index" else "float32"
    model = ({}, lambda _, x: x)
    report = to_onnx(model, tmp_path / "m.onnx", spec("3", dtype), validate="full")
    (text,) = report.differs
    found = "-2.14748e+09" if case == "an index" else case
    assert found in text.split(" is ")[1].split(", ")


def to_trace(function, program):
    import dataclasses

    from pax_export.export.tracing.traced import trace

    structs = program.traced.structs
    return dataclasses.replace(program, traced=trace(lambda v: [function(v[-1])], structs))


@pytest.mark.parametrize(("to", "name"), [(to_stablehlo, "m"), (to_saved_model, "m")])
def test_bundles_and_saved_models_are_called_so(tmp_path, monkeypatch, to, name):
    """For them jax or XLA computes, which is right; so what was asked for is counted."""
    made = []

    def noted(*given):
        for each in probes.probes(*given):
            made.append(each.inputs["x"])
            yield each

    monkeypatch.setattr(cases, "probes", noted)
    assert to(SINE, tmp_path / name, spec("4")).differs == ()
    (once,) = made
    np.testing.assert_array_equal(once, np.float32([0, -1, 100, 1e-30]))
    report = to(SINE, tmp_path / name, spec("4"), validate="full", overwrite=True)
    assert (len(made), report.differs) == (1 + 16, ())


RIGHT = onnx_rules["tanh"].function


def planted(monkeypatch, wrong):
    right = RIGHT

    def rule(writer, operand, **more):
        large = writer("Greater", writer("Abs", operand), writer.literal(np.float32(wrong)).name)
        half = writer.literal(np.float32(0.5)).name
        return writer("Where", large, half, right(writer, operand, **more))

    monkeypatch.setitem(onnx_rules, "tanh", Rule(rule))


class Pooled(pax.Module):
    def __init__(self):
        super().__init__()
        self.sums = Sums()

    def __call__(self, x):
        return {"sums": 2 * self.sums(x + 1), "same": x[:, ::-1]}


class Sums(pax.Module):
    def __call__(self, x):
        return jnp.sort(jnp.cumsum(x, axis=-1))


@pytest.mark.parametrize("validate", [True, "full"])
def test_other_operations_are_named(tmp_path, monkeypatch, validate):
    right = onnx_rules["cumsum"].function

    def least(writer, *rest, **more):
        return writer("Min", right(writer, *rest, **more), writer.literal(np.float32(60)).name)

    monkeypatch.setitem(onnx_rules, "cumsum", Rule(least))
    report = to_onnx(Pooled(), tmp_path / "m.onnx", spec("batch, 8"), validate=validate)
    (text,) = report.differs
    where = "x is 100, 10000, 1e+10, 1e+20, 1e+38, inf" if validate == "full" else "inputs are"
    assert text.startswith(
        f"differs from jax at: cumsum in sums (serving_default: sums where {where}"
    )


def test_nan_alone_is_no_error(tmp_path, monkeypatch):
    right = onnx_rules["cumsum"].function

    def without_nan(writer, *rest, **more):
        found = right(writer, *rest, **more)
        isnan = writer("IsNaN", found)
        return writer("Where", isnan, writer.literal(np.float32(0)).name, found)

    monkeypatch.setitem(onnx_rules, "cumsum", Rule(without_nan))
    model = ({}, lambda _, x: jnp.cumsum(x, axis=-1))
    report = to_onnx(model, tmp_path / "m.onnx", spec("2, 8"), validate="full")
    (text,) = report.differs
    assert re.fullmatch(
        r"differs from jax in NaN alone at: cumsum in test_probes.py:\d+:\d+ \([^ ]+\) "
        r"\(serving_default: output where x is nan\)",
        text,
    )
    with refused(ValidationError, "NaN"):
        one = np.where(np.arange(8) == 7, np.nan, np.arange(8)).astype("float32")
        to_onnx(model, tmp_path / "n.onnx", spec("8"), examples=[(one,)])


def test_large_errors_of_numbers_up_to_1e4_are_listed(tmp_path, monkeypatch):
    model = ({}, lambda _, x: jnp.tanh(x))
    planted(monkeypatch, 50)
    report = to_onnx(model, tmp_path / "m.onnx", spec("n, 8"))
    (text,) = report.differs
    assert text.startswith("differs from jax at: tanh in ")
    assert "inputs are up to 1e4" in text
    planted(monkeypatch, 1e7)
    assert to_onnx(model, tmp_path / "m.onnx", spec("n, 8"), overwrite=True).differs == ()


def test_indices_lengths_and_examples_stay_as_they_are(tmp_path):
    def lookup(table, ids, x, y):
        return table[ids] + jnp.where(jnp.arange(4) < x, 1.0, 0.0), y + 1

    ids, x, y = np.zeros(4, np.int32), np.ones(4, np.int32), np.ones(4, np.int32)
    program = jax.make_jaxpr(lookup)(jnp.ones(5), ids, x, y)
    changed = probes._side_by_side({"ids": ids, "x": x, "y": y}, program)
    np.testing.assert_array_equal(changed["ids"], ids)
    assert 2**31 - 2 in changed["x"]
    assert changed["y"].max() > 1
    model = ({}, lambda _, x: jnp.tanh(x))
    examples = [(np.ones(3, np.float32),)]
    report = to_onnx(model, tmp_path / "m.onnx", spec("3"), examples=examples)
    assert report.left_out == ()


def test_a_call_that_fails_is_listed_and_the_rest_is_made(tmp_path, monkeypatch):
    format, calls = onnx_export.ONNX, []

    def run(path, cases):
        results = []
        for case in cases:
            calls.append(case)
            if np.isnan(case["inputs"]["x"]).any():
                raise ValueError("no number")
            results.append({"output": case["inputs"]["x"]})
        return results

    monkeypatch.setattr(onnx_export.OnnxExporter, "run_here", lambda self: run)
    report = to_onnx(({}, lambda _, x: x), tmp_path / "m.onnx", spec("n"), validate="full")
    assert format.name == report.target
    assert list(report.differs) == ["differs from jax at: serving_default: output where x is nan"]


def test_what_may_not_end_or_leaves_its_marks_is_not_called_so(tmp_path):
    def halved(x):
        return jax.lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x)

    assert may_not_end(jax.make_jaxpr(halved)(jnp.ones(3)))
    assert not may_not_end(jax.make_jaxpr(jnp.sin)(jnp.ones(3)))
    report = to_onnx(({}, lambda _, x: halved(x)), tmp_path / "m.onnx", spec("4"), validate="full")
    assert report.differs == ()

    class Sum(pax.Module):
        def __init__(self):
            super().__init__()
            self.sum = jnp.zeros(3)

        def __call__(self, x):
            self.sum = self.sum + x
            return self.sum

    options = {"validate": "full", "state": "update"}
    assert to_saved_model(Sum(), tmp_path / "sum", spec("3"), **options).differs == ()


def test_a_known_difference_of_an_operator_is_listed(tmp_path):
    """Onnxruntime's Sigmoid is zero below -18, which a function of small numbers shows."""
    pytest.importorskip("onnxruntime")
    probit = lambda x: jax.scipy.special.ndtri(jax.nn.sigmoid(3 * x))  # noqa: E731
    report = to_onnx(probit, tmp_path / "m.onnx", spec("batch, 11"))
    assert any("inputs are up to 1e4" in text for text in report.differs), report.differs
    exact = to_onnx(probit, tmp_path / "exact.onnx", spec("batch, 11"), exact=True)
    assert not exact.differs
