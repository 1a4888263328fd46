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
