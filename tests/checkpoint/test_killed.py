"""Training that is killed at random moments goes on bit for bit."""

from __future__ import annotations

from tests.hard.size import runs
from tests.memory import measured

KILLS = runs(short=2, long=8)


def test_losses_of_a_killed_run_are_those_of_one_that_was_not(tmp_path):
    seen = measured("tests.checkpoint.kill_training", tmp_path, KILLS)
    assert seen["wrong"] == []
    assert len(seen["starts"]) == KILLS + 1
    assert seen["starts"] == sorted(seen["starts"])
    assert seen["starts"][-1] == seen["steps"] - 4 > 0
    # The last two, perhaps the best, and no half of one.
    assert 2 <= len(seen["left"]) <= 3
    assert all(name.isdecimal() for name in seen["left"])
