"""Training that is killed at random moments goes on bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.hard.size import runs

ROOT = Path(__file__).parent.parent.parent
KILLS = runs(short=2, long=8)


def test_losses_of_a_killed_run_are_those_of_one_that_was_not(tmp_path):
    command = [sys.executable, "-m", "tests.checkpoint.kill_training", tmp_path, str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["wrong"] == []
    assert len(seen["starts"]) == KILLS + 1
    assert seen["starts"] == sorted(seen["starts"])
    assert seen["starts"][-1] == seen["steps"] - 4 > 0
    # The last two, perhaps the best, and no half of one.
    assert 2 <= len(seen["left"]) <= 3
    assert all(name.isdecimal() for name in seen["left"])
