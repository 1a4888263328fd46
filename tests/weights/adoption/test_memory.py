"""A model larger than the memory of the host goes onto a mesh leaf by leaf, part by part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
#: MiB beside the placed arrays: of a file of 64, whose largest leaf is of 32 (Scan) or 8 (list).
MOST = 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of peaks")
def test_adopting_onto_a_mesh_holds_less_than_the_largest_leaf_beside_it(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.adoption.measure_memory", tmp_path],
        capture_output=True, text=True, cwd=ROOT, timeout=900,
        # What is let go of is to leave the process, not to be kept by the C library.
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu",
             "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("devices") == 8
    assert len(found) == 4 and {key: most for key, most in found.items() if most > MOST} == {}
