"""Two processes write one checkpoint, each its own shards; one process reads it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pax_export.checkpoint import Checkpoints
from tests.checkpoint.on_meshes import make_state

ROOT = Path(__file__).parent.parent.parent
COUNT = 2


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", ["run", "lr=[0.1]"])
def test_each_process_writes_its_shards(tmp_path, name):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.in_processes"]
            + [str(each) for each in (tmp_path / name, port, number, COUNT)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(COUNT)
    ]
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, output in enumerate(outputs):
        assert f"process {number} done" in output, output[-3000:]
    written = tmp_path / name / "2" / "model"
    assert {path.name for path in written.glob("ocdbt.process_*")} == {
        f"ocdbt.process_{number}" for number in range(COUNT)
    }
    expected = make_state()
    model = jax.eval_shape(make_state)["model"]
    state = Checkpoints(tmp_path / name).restore(model=model, steps={"epoch": 0})
    np.testing.assert_array_equal(state["model"].weight, expected["model"].weight)
    assert state["steps"] == {"epoch": 3}
