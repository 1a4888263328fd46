from __future__ import annotations

import time

import pytest

from pax_export.export.pipeline import progress as showing
from pax_export.export.pipeline.progress import Progress


def test_a_short_save_is_silent(capfd):
    with Progress(2) as progress, progress.phase("trace"):
        pass
    assert capfd.readouterr().err == ""
    assert list(progress.seconds) == ["trace"]


def test_a_long_save_names_its_phases(capfd):
    with Progress(3, patience=0.05) as progress:
        with progress.phase("trace"):
            pass
        with progress.phase("lower"):
            time.sleep(0.3)
        with progress.phase("write"):
            pass
    assert capfd.readouterr().err.splitlines() == [
        "pax_export: lower (2/3)",
        "pax_export: write (3/3)",
    ]
    assert progress.seconds["lower"] >= 0.3


def test_a_phase_keeps_its_number_when_it_is_over_or_comes_again(capfd):
    with Progress(2, patience=0.05) as progress:
        for name in ("lower", "write"):
            with progress.phase(name):
                pass
        time.sleep(0.3)  # patience ends between two phases
        with progress.phase("lower"):
            pass
    assert capfd.readouterr().err.splitlines() == [
        "pax_export: write (2/2)",
        "pax_export: lower (1/2)",
    ]


def test_a_terminal_gets_a_bar(capfd, monkeypatch):
    monkeypatch.setattr(showing.sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2, patience=0.0) as progress, progress.phase("lower"):
        deadline = time.monotonic() + 10
        while progress._shown is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(progress._shown, showing._Bar)
    assert progress._shown is None


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    monkeypatch.setitem(showing.sys.modules, "rich.progress", None)
    monkeypatch.setattr(showing.sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(showing._display(2), showing._Lines)


def test_an_error_ends_the_progress(capfd):
    with pytest.raises(KeyError), Progress(1, patience=0.0) as progress, progress.phase("lower"):
        raise KeyError
    assert progress._shown is None
