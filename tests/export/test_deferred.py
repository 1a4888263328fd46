"""Models on several devices, or on disk: in a process of its own, with eight devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EIGHT = {
    **os.environ,
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
}


def test_on_eight_devices(tmp_path):
    command = [sys.executable, "-m", "tests.export.deferred", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, env=EIGHT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("test_") == 5
