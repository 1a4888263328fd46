"""Several processes write one checkpoint, each its own shards; meshes of eight devices."""

from __future__ import annotations

import contextlib

import jax
import numpy as np

from pax_export.checkpoint import Checkpoints
from tests.checkpoint.on_meshes import make_state
from tests.processes import python
from tests.sharding.many import Process, free_port

COUNT = 2


def test_each_process_writes_its_shards(tmp_path):
    folders = [tmp_path / name for name in ("run", "lr=[0.1]")]
    command = ["-m", "tests.checkpoint.in_processes", free_port()]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(Process([*command, number, COUNT, *folders], devices=1))
            for number in range(COUNT)
        ]
        for number, process in enumerate(processes):
            process.end()
            assert f"process {number} done" in process.out, process.err[-3000:]
    expected = make_state()
    model = jax.eval_shape(make_state)["model"]
    for folder in folders:
        written = {path.name for path in (folder / "2" / "model").glob("ocdbt.process_*")}
        assert written == {f"ocdbt.process_{number}" for number in range(COUNT)}
        state = Checkpoints(folder).restore(model=model, steps={"epoch": 0})
        np.testing.assert_array_equal(state["model"].weight, expected["model"].weight)
        assert state["steps"] == {"epoch": 3}


def test_on_eight_devices(tmp_path):
    variables = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    python("-m", "tests.checkpoint.on_meshes", tmp_path, env=variables)
