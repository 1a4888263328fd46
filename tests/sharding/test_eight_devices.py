"""Runs the tests of `eight_devices/` in a process that has eight devices.

The number of devices is fixed when jax first looks for them, so they cannot run
among the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_all_of_them():
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=on_*.py", "-p"]
    done = subprocess.run(
        [*command, "no:cacheprovider", str(HERE / "eight_devices")],
        cwd=HERE.parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
