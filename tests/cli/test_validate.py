"""``pax-export validate``: exit codes, checks, and what is found out."""

from __future__ import annotations

import json
import sys
import types

import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import spec, to_saved_model


@pytest.fixture
def affine(here, call):
    """An export to be changed: without the hashes, which would tell at once."""
    arguments = ("cli_models:affine", "out", "--input", "n, 3", "--validate", "no")
    assert call("export", *arguments)[0] == 0
    (here / "out" / "SHA256SUMS").unlink()
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
    assert error.startswith("pax-export: error: ") and "cannot be called as" in error


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


def test_sizes_are_those_that_the_constraints_of_the_report_allow(here, call, quick):
    def fold(params, x, y):
        return x.reshape(-1, 2).sum(1), y[:5]

    limits = ("mod(n, 2) == 0", "m >= 5", "n <= m", "m <= 2000")
    to_saved_model(({}, fold), "out", (spec("2*n"), spec("m")), constraints=limits, validate=False)
    code, out, _ = call("validate", "out", "--json")
    sizes = [check["sizes"] for check in json.loads(out)["checks"]]
    assert (code, len(sizes)) == (0, 3)
    assert all(each["n"] % 2 == 0 and max(5, each["n"]) <= each["m"] for each in sizes)
    assert "    where n <= m\n" in call("inspect", "out")[1]
    to_saved_model(
        ({}, fold), "out", (spec("2*n"), spec("m")), overwrite=True, validate=False,
        constraints=("m >= 5000", "n >= 5001"),
    )  # fmt: skip
    code, out, _ = call("validate", "out")
    assert (code, "serving_default (n=5001, m=5001): ok, " in out) == (0, True)


def test_text_goes_in_and_comes_out(here, call, quick):
    import tensorflow as tf

    to_saved_model(
        ({"w": jnp.ones(3)}, lambda params, x: params["w"] * x[:, None]),
        "out",
        spec("batch"),
        preprocess=lambda text: tf.cast(tf.strings.length(text), tf.float32),
        preprocess_inputs=spec("batch", "string"),
        postprocess=lambda y: {"y": y, "words": tf.strings.as_string(y[:, 0]), "n": tf.size(y)},
        validate=False,
    )
    code, out, _ = call("validate", "out")
    assert code == 0
    assert out.splitlines()[1] == ("serving_default (batch=2): ok, n [], words [2], y [2, 3]")
    (here / "out" / "SHA256SUMS").unlink()
    report = here / "out" / "pax_export.json"
    report.write_text(report.read_text().replace('"string"', '"int32"', 1))
    code, out, _ = call("validate", "out")
    assert (code, out.count("FAILED")) == (1, 3)


def test_an_output_of_another_shape_is_found_out(affine, call, quick):
    report = affine / "pax_export.json"
    data = json.loads(report.read_text())
    data["signatures"]["serving_default"]["outputs"][0]["shape"] = ["n", "?", 1]
    report.write_text(json.dumps(data))
    code, out, _ = call("validate", "out")
    assert (code, "FAILED: y is float32[2, 4] instead of float32[2, ?, 1]" in out) == (1, True)
    data["signatures"]["serving_default"]["outputs"][0]["shape"] = ["n", "?"]
    report.write_text(json.dumps(data))
    assert call("validate", "out")[0] == 0
    data["signatures"]["serving_default"]["inputs"][0]["shape"] = ["__import__('os')", 3]
    report.write_text(json.dumps(data))
    code, out, error = call("validate", "out")
    assert (code, out) == (1, "")
    assert "error: The report of this export cannot be read." in error
    data["signatures"]["serving_default"]["inputs"][0] |= {"shape": ["n", 3], "dtype": "float7"}
    report.write_text(json.dumps(data))
    code, out, error = call("validate", "out")
    assert (code, out) == (1, "")
    assert (
        "error: The signature has inputs or outputs that random arrays cannot represent." in error
    )


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
    assert error.startswith("pax-export: error: The path is not an export of pax_export.")
