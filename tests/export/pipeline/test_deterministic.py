"""Equal models are equal files, wherever and whenever they are written, and tell nothing."""

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from pax_export.export import spec, to_saved_model
from tests.export import same_bytes

ROOT = Path(__file__).parents[3]


def save(path):
    table = jnp.arange(400.0)
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4), "key": jax.random.key(0)}
    methods = {
        "serving_default": lambda p, x: {"y": jnp.tanh(x @ p["w"]), "i": jnp.argmax(x, -1)},
        "other": lambda p, x: (x @ p["w"] + p["b"], table[:4], jax.random.normal(p["key"])),
    }
    inputs = dict.fromkeys(methods, spec("n, 3"))
    options = {"methods": methods, "state": "keep", "trainable": True, "validate": False}
    to_saved_model((params, methods["other"]), path, inputs, **options)


def files(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name not in ("pax_export.json", "SHA256SUMS")
    }


def test_two_processes_write_the_same_bytes(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    program = (
        "import sys; from tests.export.pipeline.test_deterministic import save; save(sys.argv[1])"
    )
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "HOME": str(folder),
        "USER": "somebody", "HOSTNAME": "somewhere",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", program, tmp_path / "one"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    to_saved_model(({}, lambda p, x: x), tmp_path / "before", spec("n"), validate=False)
    save(tmp_path / "two")

    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert sorted(one) == sorted(two)
    assert "variables/variables.data-00000-of-00001" in one
    assert [name for name in one if one[name] != two[name]] == []
    reports = [
        json.loads((tmp_path / name / "pax_export.json").read_text()) for name in ("one", "two")
    ]
    for report in reports:
        assert report.pop("seconds")  # the only thing that depends on the machine
    assert reports[0] == reports[1]

    stored = b"".join([*two.values(), (tmp_path / "two" / "pax_export.json").read_bytes()])
    told = [str(tmp_path), str(ROOT), sys.prefix, os.path.expanduser("~/"), ".py", "/tmp/"]
    told += [name for name in (socket.gethostname(), getpass.getuser()) if len(name) > 4]
    assert [text for text in told if text.encode() in stored] == []
    assert not (tmp_path / "two" / "fingerprint.pb").exists()


# --- the records by which two commits are compared: equal for equal exports alone ---


ONLY = ["*/Linear", "*/Linear.*"]


def test_two_runs_record_the_same_and_each_difference_is_one_line(tmp_path, monkeypatch):
    found = same_bytes.record(tmp_path, ONLY)
    assert found["refused"] == {}
    assert {name.partition("/")[0] for name in found["files"]} == set(same_bytes.FORMATS)

    def refuse(*args, **options):
        raise ImportError("no\nsuch module")

    monkeypatch.setitem(same_bytes.FORMATS, "tflite", (refuse, {}, ".tflite"))
    again = json.loads(json.dumps(same_bytes.record(only=ONLY)))
    file = tmp_path / "saved_model" / "Linear" / "saved_model.pb"
    file.write_bytes(file.read_bytes() + b"\0")
    changed = dict(same_bytes.programs(file.parent))["saved_model.pb"]
    again["files"]["saved_model/Linear: saved_model.pb"] = f"{len(changed)} bytes"
    lines = list(same_bytes.differences(found, again, ONLY))
    assert not any("\n" in line for line in lines)
    assert [line.partition(": ")[0] for line in lines] == ["files", "files", "refused"]
    named = [line.split(": ")[1] for line in lines]
    assert named == ["saved_model/Linear", "tflite/Linear.tflite", "tflite/Linear.tflite"]


def test_every_name_is_that_of_one_export():
    names = [name for name, _ in same_bytes.exports()]
    assert len(names) == len(set(names)) > 300
