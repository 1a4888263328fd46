"""Saves of real models that are killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KILLS = 30


def test_a_killed_save_leaves_one_whole_export(tmp_path):
    command = [sys.executable, "-m", "tests.export.kill_saves", tmp_path, str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    # Some were killed while they wrote, and some after they had taken the place.
    assert seen["leftovers"] >= 5
    assert 2 <= seen["changed"] <= KILLS
    assert seen["left"] == ["model"]
