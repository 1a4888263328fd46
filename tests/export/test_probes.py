"""Inputs far from those that a test draws: what differs there is listed."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import Report, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.formats.onnx import export as onnx_export
from pax_export.export.validation.probes import may_not_end

SINE = ({}, lambda _, x: {"sin": jnp.sin(x), "double": 2 * x})


def test_what_differs_for_large_numbers_is_listed(tmp_path):
    path = tmp_path / "m.tflite"
    report = to_tflite(SINE, path, spec("4"), validate="full")
    assert list(report.differs) == [
        "serving_default: sin where x is 1e+10, -1e+10, 1e+20, -1e+20, 1e+38, -1e+38"
    ]
    assert f"  differs     {report.differs[0]}\n" in str(report)
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


def test_a_bundle_and_the_default_are_not_called_so(tmp_path):
    assert to_stablehlo(SINE, tmp_path / "m", spec("4"), validate="full").differs == ()
    assert to_tflite(SINE, tmp_path / "m.tflite", spec("4")).differs == ()


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
