"""ONNX models tested in other runtimes than onnxruntime."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export._optional import is_installed
from pax_export.errors import (
    InvalidArgumentError,
    MissingPackageError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export.export import load, spec, to_onnx
from pax_export.export.formats.onnx import runtimes

INSTALLED = {
    "openvino": is_installed("openvino"),
    "iree": is_installed("iree.compiler") and is_installed("iree.runtime"),
    "web": runtimes._web_found(),
}


@pytest.fixture(scope="module")
def net():
    return pax.Sequential(
        pax.Conv2D(1, 4, 3), jax.nn.relu, lambda x: x.reshape(x.shape[0], -1), pax.Linear(64, 5)
    )


@pytest.mark.parametrize("name", runtimes.NAMES)
def test_a_model_is_tested_in_each_that_is_installed(tmp_path, net, name):
    if not INSTALLED[name]:
        pytest.skip(f"{name} is not installed")
    images = spec("batch, 4, 4, 1")
    report = to_onnx(net, tmp_path / "m.onnx", images, runtimes=["onnxruntime", name])
    assert 0 <= report.details["largest_error_in"][name] < 1e-4
    assert load(tmp_path / "m.onnx").report.details == report.details
    assert name in (tmp_path / "m.onnx.html").read_text()


@pytest.mark.parametrize("name", runtimes.NAMES)
def test_one_that_is_missing_is_said_before_any_work(tmp_path, name):
    if INSTALLED[name]:
        pytest.skip(f"{name} is installed")

    def model(x):
        raise AssertionError("it is traced")

    with pytest.raises(MissingPackageError, match=rf"runtimes=\['{name}'\]"):
        to_onnx(model, tmp_path / "m.onnx", spec("2"), runtimes=[name])


def planted(monkeypatch, run):
    monkeypatch.setattr(runtimes, "check", lambda names: None)
    monkeypatch.setitem(runtimes._RUNS, "openvino", run)


def test_another_result_there_is_refused(tmp_path, monkeypatch):
    planted(monkeypatch, lambda file, calls: [{"output": np.sin(c["x"]) + 1} for c in calls])
    with pytest.raises(ValidationError, match="in openvino"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["openvino"])
    assert not list(tmp_path.iterdir())


def test_one_that_cannot_run_it_says_why(tmp_path, monkeypatch):
    def crash(file, calls):
        raise RuntimeError("no kernel")

    planted(monkeypatch, crash)
    with pytest.raises(UnsupportedOperationError, match="openvino does not run") as caught:
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["openvino"])
    assert "no kernel" in caught.value.got and not list(tmp_path.iterdir())


def test_refusals(tmp_path):
    with pytest.raises(InvalidArgumentError, match="runtimes"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("batch, 3"), runtimes=["tvm"])
    with pytest.raises(InvalidArgumentError, match="make the calls of a test"):
        to_onnx(jnp.sin, tmp_path / "m.onnx", spec("3"), runtimes=["iree"], validate=False)
