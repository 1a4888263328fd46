"""``pax-export export`` and ``pax-export inspect``, in process and as commands."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from pax_export.cli import main
from tests.processes import python

FACTORIES = """
import jax.numpy as jnp
import pax_export as pax

def net():
    return pax.Sequential(pax.Linear(3, 4), jnp.tanh)

def masked():
    return {"w": jnp.ones(3)}, lambda params, x, *, mask: jnp.where(mask, x * params["w"], 0)

def counting():
    class Counter(pax.Module):
        def __init__(self):
            super().__init__()
            self.steps = jnp.zeros(())
        def __call__(self, x):
            self.steps = self.steps + 1
            return x + self.steps
    return Counter()

def coder():
    class Coder(pax.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = pax.Linear(3, 2), pax.Linear(2, 3)
        def encode(self, x, *, scale):
            return {"code": self.down(x) * scale}
        def __call__(self, x):
            return self.up(self.down(x))
    pax.seed_rng_key(0)  # every call makes the same model
    return Coder()

def broken():
    raise RuntimeError("no weights here")

constant = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "cli_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_factories", raising=False)
    return tmp_path


def export(*arguments):
    return main(["export", *arguments])


def test_a_model_is_written_and_reported(here, capsys):
    assert export("cli_factories:net", "served/1", "--input", "batch, 3:float32") == 0
    assert "runs in     TensorFlow 2.15 and newer" in capsys.readouterr().out
    assert (here / "served" / "1" / "saved_model.pb").exists()
    assert main(["inspect", "served/1"]) == 0
    out = capsys.readouterr().out
    assert ": float32[batch, 3]" in out
    assert "    modules.0.weight: float32[3, 4]" in out


def test_named_inputs_and_options(here, capsys):
    code = export(
        "cli_factories:masked", "out", "--input", "n, 3", "--input", "mask=n, 3:bool",
        "--constraint", "n <= 64", "--platform", "cpu", "--platform", "cuda", "--trainable",
        "--consumer", "tensorflow>=2.15", "--validate", "no", "--json",
    )  # fmt: skip
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    (signature,) = report["signatures"].values()
    assert [entry["name"] for entry in signature["inputs"]] == ["x", "mask"]
    assert [entry["dtype"] for entry in signature["inputs"]] == ["float32", "bool"]
    assert report["platforms"] == ["cpu", "cuda"]
    assert report["validated"] is None
    assert signature["differentiable"]
    assert main(["inspect", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


def test_operations_are_those_that_were_asked_for(here, capsys):
    arguments = "cli_factories:net", "out", "--input", "n, 3", "--overwrite"
    for operations in ("tensorflow", "xla"):
        assert export(*arguments, "--operations", operations) == 0
        by_xla = b"XlaCallModule" in (here / "out" / "saved_model.pb").read_bytes()
        assert by_xla is (operations == "xla")
    with pytest.raises(SystemExit):
        export(*arguments, "--operations", "tensorfow")
    assert "tensorfow" in capsys.readouterr().err


def test_weights_as_integers(here, capsys):
    arguments = ["--input", "batch, 3", "--target", "onnx", "--bits", "8", "--accuracy-level", "1"]
    assert main(["export", "cli_factories:net", "net.onnx", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert "modules.0.weight  int8" in printed.err
    found = json.loads(printed.out)["details"]["quantized"]
    lost = found.pop("weights lose")  # as far as it is known without batches
    assert lost["bytes"] == [64, 44]
    told = {"weights": 1, "bits": [8], "multiplied": 1, "in integers": 0}
    assert found == told | {"accuracy_level": 1}


def test_an_existing_directory_needs_overwrite(here, capsys):
    arguments = ("cli_factories:net", "out", "--input", "n, 3", "--validate", "no")
    assert export(*arguments) == 0
    capsys.readouterr()
    assert export(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pax-export: error: ") and "where: " in captured.err
    assert captured.err.count("\n") == 1 and "--overwrite" in captured.err
    assert export(*arguments, "--overwrite") == 0


def test_variables_alone_are_compared(here, capsys):
    arguments = ("cli_factories:net", "out", "--input", "n, 3", "--validate", "variables")
    assert export(*arguments, "--target", "tflite") == 1
    error = capsys.readouterr().err
    assert "got: --validate variables with --target tflite" in error
    assert not (here / "out").exists()
    assert export(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["validated"] == "variables"
    assert report["largest_error"] == {}
    assert export(*arguments[:-1], "full", "--overwrite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["validated"] == "here"


def test_state_is_refused_or_updated(here, capsys):
    arguments = ("cli_factories:counting", "out", "--input", "n", "--validate", "no")
    assert export(*arguments) == 1
    error = capsys.readouterr().err
    assert "where: steps" in error
    assert "--state update" in error
    assert export(*arguments, "--state", "update") == 0


@pytest.mark.parametrize(
    ("factory", "got"),
    [
        ("cli_factories", "got: cli_factories"),
        ("cli_factories:nothing", "where: cli_factories; got: nothing"),
        ("cli_factories:constant", "where: cli_factories; got: constant"),
        ("cli_nowhere:net", "got: cli_nowhere"),
    ],
)
def test_a_missing_factory_is_refused(here, capsys, factory, got):
    assert export(factory, "out", "--input", "n, 3") == 1
    assert got in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_factory_that_fails_is_a_traceback_and_one_line(here, capsys):
    assert export("cli_factories:broken", "out", "--input", "n, 3") == 1
    error = capsys.readouterr().err
    assert "in broken\n" in error
    last = error.splitlines()[-1]
    assert last.startswith("pax-export: error: ")
    assert last.endswith("got: RuntimeError: no weights here")


@pytest.mark.parametrize("text", ["n,,3", "n, 3:float31", "a b=n, 3"])
def test_an_input_that_cannot_be_read(here, capsys, text):
    assert export("cli_factories:net", "out", "--input", text) == 1
    error = capsys.readouterr().err
    assert error.startswith("pax-export: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["export"], ["export", "a:b", "out"], ["inspect"], ["validate"], ["run"], ["no"], []],
)
def test_wrong_usage_is_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: pax-export" in capsys.readouterr().err


def test_as_a_command(here):
    done = python("-m", "pax_export", "inspect", here, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(here) in done.stderr


def test_another_target(here, capsys, quick):
    arguments = ("cli_factories:net", "out", "--input", "n, 3", "--target", "stablehlo")
    assert export(*arguments, "--trainable") == 1
    error = capsys.readouterr().err
    assert "got: --trainable with --target stablehlo; fix: --target savedmodel or torch\n" in error
    assert export(*arguments, "--vjp-order", "1", "--platform", "cpu", "--validate", "no") == 0
    assert "as a StableHLO bundle" in capsys.readouterr().out
    assert main(["inspect", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "stablehlo"
    assert main(["validate", "out"]) == 0
    assert "serving_default (n=2): ok, output [2, 4]" in capsys.readouterr().out


def test_several_methods_each_with_inputs_of_its_own(here, capsys, quick):
    code = export(
        "cli_factories:coder", "out", "--method", "serving_default=__call__",
        "--method", "encode=encode", "--input", "serving_default:n, 3", "--validate", "no",
        "--input", "encode:n, 3:float32", "--input", "encode: scale=:float32", "--json",
    )  # fmt: skip
    assert code == 0
    signatures = json.loads(capsys.readouterr().out)["signatures"]
    inputs = {
        key: [(entry["name"], entry["shape"]) for entry in info["inputs"]]
        for key, info in signatures.items()
    }
    assert inputs == {
        "serving_default": [("x", ["n", 3])],
        "encode": [("x", ["n", 3]), ("scale", [])],
    }
    assert main(["validate", "out", "--against", "cli_factories:coder"]) == 0
    assert capsys.readouterr().out.count(": ok, ") == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "a=encode", "--method", "b=__call__", "--input", "n, 3"),
         'fix: --input "a:n, 3" or --input "b:n, 3"'),
        (("--method", "a=encode", "--method", "a=__call__", "--input", "n, 3"),
         "where: a; got: a=__call__"),
        (("--method", "encode", "--input", "n, 3"), "got: encode;"),
        (("--method", "a=nothing", "--input", "n, 3"), "Coder"),
        (("--input", "x=n, 3", "--input", "x=n, 4"), "got: x=n, 4"),
        (("--method", "a=encode", "--method", "b=__call__", "--input", "a:n, 3",
          "--input", "a:scale="), "inputs"),
    ],
)  # fmt: skip
def test_invalid_methods_are_refused(here, capsys, arguments, message):
    assert export("cli_factories:coder", "out", *arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pax-export: error: ")
    assert message in error
    assert not (here / "out").exists()


def test_a_method_alone_needs_no_key_before_its_inputs(here, capsys):
    arguments = ("--method", "code=encode", "--input", "n, 3", "--input", "scale=")
    assert export("cli_factories:coder", "out", *arguments, "--validate", "no") == 0
    assert "  code\n    in   x: float32[n, 3]\n" in capsys.readouterr().out


def test_tflite_from_export_to_run(here, capsys, quick):
    arguments = ("cli_factories:net", "net.tflite", "--input", "2, 3", "--target", "tflite")
    assert export(*arguments, "--opset", "21") == 1
    assert "fix: --target onnx" in capsys.readouterr().err
    assert export(*arguments, "--quantize", "float16") == 0
    out = capsys.readouterr().out
    assert "Sequential as a TFLite model" in out
    assert "quantize=float16" in out
    assert main(["inspect", "net.tflite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["details"]["quantize"] == "float16"
    assert main(["validate", "net.tflite"]) == 0
    assert "serving_default: ok, output [2, 4]" in capsys.readouterr().out
    np.save("x.npy", np.ones((2, 3), np.float32))
    assert main(["run", "net.tflite", "--input", "x.npy"]) == 0
    assert capsys.readouterr().out == "output: float32[2, 4]\n"
    (here / "net.tflite").write_bytes((here / "net.tflite").read_bytes()[:-9])
    assert main(["run", "net.tflite", "--input", "x.npy"]) == 1
    assert "pax-export: error: " in capsys.readouterr().err


def test_a_wrong_shape_is_refused_before_tensorflow_is_loaded(here):
    code = """
import sys
from pax_export.cli import main
assert main(["export", "cli_factories:net", "out", "--input", "batch, 5"]) == 1
assert "tensorflow" not in sys.modules and "orbax.checkpoint" not in sys.modules
"""
    assert "pax-export: error: " in python("-c", code, cwd=here).stderr
    assert not (here / "out").exists()
