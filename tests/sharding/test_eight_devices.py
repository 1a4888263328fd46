"""Runs the tests of `eight_devices/` in a process that has eight devices.

The number of devices is fixed when jax first looks for them, so they cannot run
among the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "file", sorted((HERE / "eight_devices").glob("on_*.py")), ids=lambda file: file.stem
)
def test_all_of_them(file):
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=on_*.py", "-p"]
    done = subprocess.run(
        [*command, "no:cacheprovider", str(file)],
        cwd=HERE.parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
