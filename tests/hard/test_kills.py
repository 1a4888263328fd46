"""Writers that are killed at random moments lose nothing and leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.hard.size import runs

ROOT = Path(__file__).parents[2]


def test_a_killed_write_leaves_the_old_or_the_new_file(tmp_path):
    kills = runs(short=4, long=80)
    command = [sys.executable, "-m", "tests.hard.kill_writers", tmp_path, str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)
    print(done.stdout)
    assert len(figures) == 6
    for seen in figures.values():
        assert sorted({*seen["left"]} - {"model.html"}) == ["data.csv", "model"]  # a file's card
        assert seen["temporary"] == []
    # Some were killed while they wrote, and some after they had taken the place.
    assert sum(seen["leftovers"] for seen in figures.values()) > 0
    assert sum(seen["changed"] for seen in figures.values()) > 0
