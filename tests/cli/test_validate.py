"""``pax-export validate``: exit codes, checks, and what is found out."""

from __future__ import annotations

import json
import sys
import types

import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import _served, _validate, spec, to_saved_model


@pytest.fixture
def quick(monkeypatch):
    """Makes the calls in this process: a fresh one spends seconds on its imports."""

    def here(runtime, place, calls, mode):
        assert mode == "each"
        return _served.run_each(runtime, str(place), calls)

    monkeypatch.setattr(_validate, "in_process", here)


@pytest.fixture
def affine(here, call):
    arguments = ("cli_models:affine", "out", "--input", "n, 3", "--validate", "no")
    assert call("export", *arguments)[0] == 0
    return here / "out"


def test_a_good_export_is_valid_alone_and_against_its_model(affine, call):
    code, out, _ = call("validate", "out", "--against", "cli_models:affine", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["valid"]
    assert [check["sizes"] for check in found["checks"]] == [{"n": 1}, {"n": 2}, {"n": 5}]
    assert [check["shapes"]["y"] for check in found["checks"]] == [[1, 4], [2, 4], [5, 4]]
    assert all(0 <= check["largest_error"]["y"] < 1e-5 for check in found["checks"])


def test_another_model_is_found_out(affine, call, quick):
    code, out, error = call("validate", "out", "--against", "cli_models:other")
    assert code == 1
    assert out.splitlines()[0].startswith(
        "serving_default (n=1): FAILED: A result of the exported model differs from the model's."
    )
    assert error.startswith(
        "pax-export: error: The export is not valid. where: out; got: 3 of 3 calls failed; "
    )


def test_a_stranger_cannot_be_compared(affine, call, quick):
    code, out, error = call("validate", "out", "--against", "cli_models:stranger")
    assert (code, out) == (1, "")
    assert "The model to compare with cannot be called as the export can." in error


def test_a_damaged_export_is_found_out(affine, call, quick):
    report = affine / "pax_export.json"
    data = json.loads(report.read_text())
    data["signatures"]["serving_default"]["outputs"][0]["dtype"] = "float16"
    report.write_text(json.dumps(data))
    code, out, _ = call("validate", "out", "--json")
    assert code == 1
    assert {check["problem"] for check in json.loads(out)["checks"]} == {
        f"y is float32[{n}, 4] instead of float16[{n}, 4]" for n in (1, 2, 5)
    }
    (affine / "variables" / "variables.index").write_bytes(b"x")
    code, out, _ = call("validate", "out")
    assert code == 1
    assert out.count("FAILED") == 3


def test_sizes_that_a_constraint_forbids_are_no_failures(here, call, quick):
    params, function = {"w": jnp.ones(())}, lambda p, x: jnp.log(p["w"] * x).sum()
    to_saved_model((params, function), "out", spec("n"), constraints=("n >= 20",), validate=False)
    code, out, _ = call("validate", "out")
    assert code == 1  # the logarithm of a negative number
    assert "(n=20): FAILED: output has 1 of 1 elements that are not finite" in out
    code, out, _ = call("validate", "out", "--not-finite")
    assert code == 0
    assert "(n=20): ok, output []" in out
    assert "n=16" not in out


def test_methods_are_named(here, call, quick, monkeypatch):
    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.scale = jnp.full((), 2.0)

        def __call__(self, x):
            return self.scale * x

        def encode(self, x):
            return {"code": x - self.scale}

    inputs = {"serving_default": spec("n"), "encode": spec("n"), "plus": spec("n")}
    methods = {"serving_default": "__call__", "encode": "encode", "plus": "__call__"}
    to_saved_model(Net(), "out", inputs, methods=methods, validate=False)
    monkeypatch.setitem(sys.modules, "cli_net", types.SimpleNamespace(net=Net))
    code, out, _ = call("validate", "out", "--against", "cli_net:net")
    assert (code, out.count(": ok, ")) == (0, 9)
    code, out, _ = call("validate", "out", "--against", "cli_net:net", "--method", "plus=encode")
    assert code == 1


def test_nothing_to_validate(here, call):
    code, _, error = call("validate", "nowhere")
    assert code == 1
    assert error.startswith("pax-export: error: There is no export of pax_export here.")
