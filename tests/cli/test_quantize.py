"""``pax-export quantize``: what it prints and writes."""

import json

import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close

NET = """
import pax_export as pax

def net():
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(64, 32), pax.Linear(32, 8))
"""


@pytest.fixture
def batch(here):
    (here / "net_models.py").write_text(NET)
    x = np.random.default_rng(0).normal(size=(5, 64)).astype("f")
    np.save(here / "x.npy", x)
    np.savez(here / "x.npz", x)
    return x


def quantized(batch, **options):
    import net_models

    return pax.quantize(net_models.net(), [batch], **options)


@pytest.mark.parametrize("file", ["x.npy", "x.npz"])
def test_the_integers_are_in_the_file(here, call, batch, file):
    arguments = "net_models:net", "small.safetensors", "--bits", 4, "--batch", file
    code, out, _ = call("quantize", *arguments)
    assert code == 0 and "2 weights quantized" in out and "int4, groups of 32" in out
    small, _ = quantized(batch, bits=4)
    read = pax.load_weights(small.map(lambda leaf: leaf * 0), here / "small.safetensors")
    assert_close(read(batch), small(batch))


def test_the_report_as_json(call, batch):
    code, out, _ = call(
        *("quantize", "net_models:net", "--batch", "x.npy", "--json", "--at", "modules.0"),
        *("--activations", "static", "--rounding", "gptq"),
    )
    report = json.loads(out)
    assert code == 0 and [each["name"] for each in report["leaves"]] == ["modules.0.weight"]
    assert report["leaves"][0]["rounding"] == "gptq" and report["difference"]["largest"] > 0
    assert report["weights_alone"]["mean"] <= report["difference"]["mean"]


def test_what_runtimes_add(call, batch):
    pytest.importorskip("onnxruntime")
    arguments = "net_models:net", "--bits", 4, "--scheme", "asymmetric", "--batch", "x.npy"
    code, out, _ = call("quantize", *arguments, "--runtime", "onnx", "--runtime", "stablehlo")
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("  in ")}
    assert code == 0 and list(lines) == ["onnx", "stablehlo"] and "a call" in lines["onnx"]
    assert "int4, zero points, groups of 32" in out
    code, out, _ = call("quantize", *arguments, "--runtime", "onnx", "--json")
    found = json.loads(out)
    assert 0 < found["runtimes"]["onnx"]["mean"] < found["difference"]["mean"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--batch", "nowhere.npy"), "nowhere.npy"),
        (("--batch", "net_models.py"), "net_models.py"),
        (("x.npy", "--batch", "x.npy"), "--overwrite"),
        (("net_models.py/small.safetensors", "--batch", "x.npy"), "net_models.py"),
        ((".", "--overwrite", "--batch", "x.npy"), "directory"),
        (("--activations", "fast"), "fast"),
        (("--budget", "0", "--batch", "x.npy"), "budget"),
        (("--runtime", "onnx"), "--batch"),
        (("--scheme", "affine"), "asymmetric"),
    ],
)
def test_bad_arguments(call, batch, arguments, named):
    code, _, error = call("quantize", "net_models:net", *arguments)
    assert code == 1 and named in error
