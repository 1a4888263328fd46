"""Several processes write one checkpoint, each its own shards; meshes of eight devices."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from pax_export.checkpoint import Checkpoints
from tests.checkpoint.on_meshes import make_state
from tests.processes import python
from tests.sharding.many import Process, free_port

COUNT = 2


@pytest.mark.parametrize("name", ["run", "lr=[0.1]"])
def test_each_process_writes_its_shards(tmp_path, name):
    port = free_port()
    command = ["-m", "tests.checkpoint.in_processes", tmp_path / name, port]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(Process([*command, number, COUNT], devices=1))
            for number in range(COUNT)
        ]
        for number, process in enumerate(processes):
            process.end()
            assert f"process {number} done" in process.out, process.err[-3000:]
    written = tmp_path / name / "2" / "model"
    assert {path.name for path in written.glob("ocdbt.process_*")} == {
        f"ocdbt.process_{number}" for number in range(COUNT)
    }
    expected = make_state()
    model = jax.eval_shape(make_state)["model"]
    state = Checkpoints(tmp_path / name).restore(model=model, steps={"epoch": 0})
    np.testing.assert_array_equal(state["model"].weight, expected["model"].weight)
    assert state["steps"] == {"epoch": 3}


def test_on_eight_devices(tmp_path):
    variables = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    python("-m", "tests.checkpoint.on_meshes", tmp_path, env=variables)
