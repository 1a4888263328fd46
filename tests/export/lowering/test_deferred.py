"""Models on several devices, or on disk: in a process of its own, with eight devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EIGHT = {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_PLATFORMS": "cpu",
}


def test_on_eight_devices(tmp_path):
    command = [sys.executable, "-m", "tests.export.deferred", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, env=EIGHT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("test_") == 5


SIZE = 128  # MiB, in four variables
LARGEST = SIZE / 4
#: What compiling and tracing take, whatever the size of the model.
FIXED = 24


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of peaks")
def test_an_export_holds_one_array_at_a_time(tmp_path):
    command = [sys.executable, "-m", "tests.export.measure_deferred", tmp_path, str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, env=EIGHT)
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads(done.stdout)
    assert peaks["devices"] <= LARGEST + FIXED
    # One that is read is there three times for a moment: decoded, put together, written.
    assert peaks["disk"] <= 3 * LARGEST + FIXED < SIZE
