"""Checkpoints between meshes: in a process of its own, with eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_on_eight_devices(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.on_meshes", tmp_path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("test_") == 3
