"""``pax-export certify``: what it runs, compares and writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pax_export.errors import ExportPathError
from pax_export.export import Report, load
from pax_export.export.artifact import embedded
from pax_export.export.formats.onnx import runtimes
from pax_export.export.validation import certify as certifying
from tests.export import planted_runtimes

ARGUMENTS = "--input", "n, 3", "--validate", "no"


@pytest.fixture
def model(here, call):
    arguments = "cli_models:affine", "m.onnx", "--target", "onnx", *ARGUMENTS
    assert call("export", *arguments)[0] == 0
    return here / "m.onnx"


@pytest.fixture
def planted(monkeypatch):
    """Other runtimes, of which OpenVINO is there, and computes what it is told."""

    def plant(does):
        monkeypatch.setattr(runtimes, "_web_found", lambda: False)
        monkeypatch.setattr(runtimes, "find", find)
        monkeypatch.setattr(runtimes, "run", run)
        run.does = getattr(planted_runtimes, does)

    def find(package, extra, purpose):
        if package != "openvino":
            raise runtimes.MissingPackageError(f"{purpose} needs {package}")

    def run(name, file, cases, seconds=None):
        try:
            return run.does(file, cases)
        except RuntimeError as error:
            raise runtimes._refused(name, "does not run", str(error)) from error

    return plant


def test_results_are_in_the_report_and_on_the_card(model, call, quick, planted):
    planted("affine")
    before, data = model.read_bytes(), np.ones((2, 3), np.float32)
    code, out, _ = call("certify", "m.onnx", "--against", "cli_models:affine", "--json")
    assert code == 0
    found = json.loads(out)["runtimes"]
    assert [each["runtime"] for each in found] == ["onnxruntime", "openvino"]
    assert all(each["calls"] == 3 and each["compared_with"] == "jax" for each in found)
    assert all(0 <= each["largest_error"] < 1e-5 for each in found)
    report = Report.read(model)
    assert report.details["certified"].keys() == {"onnxruntime", "openvino"}
    assert "certified   openvino" in str(report)
    assert "from jax</li>" in model.with_name("m.onnx.html").read_text()
    assert load(model)(data)["y"].shape == (2, 4)  # and the hash in it fits
    certified = model.read_bytes()
    embedded.remove_report(model)
    assert before.startswith(model.read_bytes()) and len(certified) > len(before)


def test_without_the_model_the_runtime_of_the_format_is_the_measure(model, call, quick, planted):
    planted("affine")
    assert call("certify", "m.onnx")[0] == 0
    told = Report.read(model).details["certified"]
    assert "largest_error" not in told["onnxruntime"] and told["onnxruntime"]["calls"] == 3
    assert told["openvino"]["compared_with"] == "onnxruntime"
    assert told["openvino"]["largest_error"] < 1e-5


def test_another_result_is_a_failure_and_written_down(model, call, quick, planted):
    planted("other")
    code, _, error = call("certify", "m.onnx")
    assert code == 1 and "1 of 2 runtimes do not run this export right. where: openvino" in error
    assert Report.read(model).details["certified"]["openvino"]["differs"]


def test_a_refusal_is_a_failure_of_a_runtime_that_was_asked_for(model, call, quick, planted):
    planted("refuses")
    code, out, _ = call("certify", "m.onnx")
    assert code == 0 and "does not run this model. no kernel" in out
    assert call("certify", "m.onnx", "--runtime", "openvino")[0] == 1
    code, _, error = call("certify", "m.onnx", "--runtime", "iree")
    assert code == 1 and "certify in iree needs iree.compiler" in error
    code, _, error = call("certify", "m.onnx", "--runtime", "tvm")
    assert code == 1 and "None of these runtimes reads this export. got: tvm" in error


@pytest.mark.parametrize("target", ["tflite", "stablehlo", "savedmodel"])
def test_other_formats_run_in_their_own_runtime(here, call, quick, target):
    path = "m.tflite" if target == "tflite" else "m"
    assert call("export", "cli_models:affine", path, "--target", target, *ARGUMENTS)[0] == 0
    assert call("certify", path, "--against", "cli_models:affine")[0] == 0
    (told,) = Report.read(here / path).details["certified"].values()
    assert told["compared_with"] == "jax" and told["largest_error"] < 1e-5
    assert call("validate", path)[0] == 0
    page = here / (f"{path}.html" if target == "tflite" else "m/pax_export.html")
    assert "from jax</li>" in page.read_text()


def test_external_data_is_kept(here, call, quick, planted):
    planted("affine")
    how = "--target", "onnx", *ARGUMENTS, "--external-data"
    assert call("export", "cli_models:affine", "m.onnx", *how)[0] == 0
    (data,) = here.glob("m.onnx.*.data")
    inode = data.stat().st_ino
    assert call("certify", "m.onnx")[0] == 0
    assert data.stat().st_ino == inode and call("validate", "m.onnx")[0] == 0


def test_unsupported_files_are_refused(model, call, quick, planted, monkeypatch):
    planted("affine")
    model.with_name("none.onnx").write_bytes(b"\x08\x0a")
    error = call("certify", "none.onnx")[2]
    assert "none.onnx" in error and "not an export" in error
    damaged = bytearray(model.read_bytes())
    damaged[40] ^= 1
    model.with_name("damaged.onnx").write_bytes(damaged)
    code, _, error = call("certify", "damaged.onnx")
    assert code == 1 and "damaged.onnx" in error and "hash" in error
    with monkeypatch.context() as patch:
        patch.setattr(certifying.own_exports.os, "access", lambda *_: False)
        code, _, error = call("certify", "m.onnx")
        assert code == 1 and "m.onnx" in error and "read only" in error

    def missing(package, extra, purpose):
        raise runtimes.MissingPackageError(f"{purpose} needs {package}")

    monkeypatch.setattr(certifying, "find", missing)
    code, _, error = call("certify", "m.onnx")
    assert code == 1 and "certify needs onnxruntime" in error
    with pytest.raises(ExportPathError):
        certifying.certify(model.with_name("nothing"))
