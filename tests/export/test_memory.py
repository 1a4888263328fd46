"""An export of a large model holds it once, as it was held before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SIZE = 256  # MiB, in four variables
#: What compiling and tracing take, whatever the size of the model.
FIXED = 24


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of peaks")
def test_an_export_copies_no_weights(tmp_path):
    command = [sys.executable, "-m", "tests.export.measure_memory", tmp_path / "m", str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads(done.stdout)
    assert sorted(peaks) == ["False", "True"]
    # A copy of one variable would be 64 MiB.
    assert max(peaks.values()) <= 0.05 * SIZE + FIXED
