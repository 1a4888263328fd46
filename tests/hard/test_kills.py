"""Writers that are killed at random moments lose nothing and leave nothing."""

from __future__ import annotations

from tests.hard.size import runs
from tests.memory import measured


def test_a_killed_write_leaves_the_old_or_the_new_file(tmp_path):
    figures = measured("tests.hard.kill_writers", tmp_path, runs(short=4, long=80), timeout=3000)
    print(figures)
    assert len(figures) == 9
    for seen in figures.values():
        assert sorted({*seen["left"]} - {"model.html"}) == ["data.csv", "model"]  # a file's card
        assert seen["temporary"] == []
    # Some were killed while they wrote, and some after they had taken the place.
    assert sum(seen["leftovers"] for seen in figures.values()) > 0
    assert sum(seen["changed"] for seen in figures.values()) > 0
