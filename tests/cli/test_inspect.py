"""``pax-export inspect``: exports of ours, of others, and what is none."""

from __future__ import annotations

import json

import pytest

import pax_export as pax
from pax_export.export import spec, to_onnx
from pax_export.export.artifact import saved_models


def test_what_jax2tf_wrote_is_described(foreign, call):
    code, out, _ = call("inspect", "foreign", "--json")
    found = json.loads(out)
    assert (code, found["foreign"]) == (0, True)
    (signature,) = found["signatures"].values()
    assert [(entry["name"], entry["shape"]) for entry in signature["inputs"]] == [("x", ["?", 3])]
    assert [(entry["name"], entry["shape"]) for entry in signature["outputs"]] == [("y", ["?", 2])]
    assert [(v["name"], v["bytes"], v["trainable"]) for v in found["variables"]] == [
        ("w", 48, True)
    ]
    assert found["graph_bytes"] == (foreign / "saved_model.pb").stat().st_size
    assert found["tensorflow"].startswith("2.")
    assert {module["platforms"][0] for module in found["modules"]} == {"cpu"}
    code, out, _ = call("inspect", "foreign")
    assert code == 0
    assert "a SavedModel without a report of pax_export" in out
    assert "    w: float32[3, 4] trainable" in out


def test_the_oldest_tensorflow_of_others():
    def module(stablehlo, convention, *names):
        return saved_models.XlaModule(stablehlo, convention, ("cpu",), 1, names)

    assert saved_models._oldest_tensorflow(()) == (None, "")
    assert saved_models._oldest_tensorflow((module(None, 9),)) == (None, "")
    assert saved_models._oldest_tensorflow((module("0.9.0", 8), module("1.3.0", 9))) == ("2.18", "")
    oldest, problem = saved_models._oldest_tensorflow((module("1.15.0", 10),))
    assert oldest is None
    assert problem == (
        "it needs StableHLO 1.15.0, calling convention 10; `pax-export retarget` mends it"
    )
    oldest, problem = saved_models._oldest_tensorflow((module("0.9.0", 8, "lapack_spotrf_ffi"),))
    assert (oldest, problem) == (None, "it calls lapack_spotrf_ffi, which only jax has")


def test_a_savedmodel_of_tensorflow_alone(here, call):
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), "plain")
    code, out, _ = call("inspect", "plain")
    assert code == 0
    assert "runs in     TensorFlow; it was written by 2." in out


REPORTS = ["", "{}", "[]", "null", "[" * 100_000, '{"format": 1, "signatures": 3}', "\0"]


@pytest.mark.parametrize(
    ("what", "file", "content"),
    [
        *(("SavedModel", "saved_model.pb", x) for x in (b"", b"\xff\xff", b"no model at all")),
        *(("report of this export", "pax_export.json", text.encode()) for text in REPORTS),
    ],
)
def test_damaged_and_hostile_files(here, call, what, file, content):
    (here / "bad").mkdir()
    (here / "bad" / file).write_bytes(content)
    code, out, error = call("inspect", "bad")
    assert (code, out) == (1, "")
    assert f"error: The {what} cannot be read. where: bad" in error


@pytest.mark.parametrize("path", [".", "nowhere", "cli_models.py"])
def test_nothing_to_inspect(here, call, path):
    code, out, error = call("inspect", path)
    assert (code, out) == (1, "")
    assert "error: The path is not an export of pax_export." in error


def test_the_table_with_the_work_of_a_call(here, call):
    net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
    to_onnx(net, here / "net.onnx", spec("batch, 3"), validate=False)
    code, out, _ = call("inspect", "net.onnx", "--flops")
    assert code == 0 and "46*batch FLOPs a call" in out and "modules.0.weight  float32[3,4]" in out
    code, out, _ = call("inspect", "net.onnx", "--flops", "--json")
    assert code == 0 and json.loads(out)["flops"] == "46*batch"
    code, _, err = call("inspect", "nothing.onnx", "--flops")
    assert code == 1 and "nothing.onnx" in err
