"""All or nothing: what is on disk after success, failure, and death."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from pax_export._errors import ExportPathError
from pax_export.export import _directory
from pax_export.export._directory import replaced


def write(path, text, overwrite=False):
    with replaced(path, overwrite) as directory:
        (directory / "file").write_text(text)


def test_a_new_directory_appears_whole(tmp_path):
    path = tmp_path / "deep" / "down"
    with replaced(path, overwrite=False) as directory:
        (directory / "file").write_text("new")
        assert not path.exists()
    assert (path / "file").read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["down"]
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777


def test_an_existing_directory_is_refused(tmp_path):
    write(tmp_path / "a", "old")
    with pytest.raises(ExportPathError) as caught:
        write(tmp_path / "a", "new")
    assert caught.value.what == "There is something at this place already."
    assert caught.value.write == "another path, or overwrite=True to replace it"
    assert (tmp_path / "a" / "file").read_text() == "old"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwrite_replaces_and_leaves_no_stale_file(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(_directory, "_exchange", lambda one, other: False)
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "stale").write_text("x")
    write(tmp_path / "a", "new", overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["file"]
    assert (tmp_path / "a" / "file").read_text() == "new"


def test_a_failure_leaves_what_was_there(tmp_path):
    write(tmp_path / "a", "old")
    with pytest.raises(KeyError), replaced(tmp_path / "a", overwrite=True) as directory:
        (directory / "file").write_text("half")
        raise KeyError
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "file").read_text() == "old"


def test_whoever_comes_second_is_refused(tmp_path):
    with pytest.raises(ExportPathError, match="already"), replaced(tmp_path / "a", False) as mine:
        (mine / "file").write_text("second")
        write(tmp_path / "a", "first")
    assert (tmp_path / "a" / "file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportPathError, match="cannot be written here"):
        write(tmp_path / "file" / "inside", "new")
    with pytest.raises(ExportPathError, match="This is no directory"):
        write(tmp_path / "file", "new", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_place_that_takes_no_directory():
    with pytest.raises(ExportPathError) as caught:
        write(_directory.Path("/proc/here"), "new")
    assert caught.value.what == "The export cannot be written here."
    assert caught.value.where == "/proc/here"


WRITER = """
import sys
from pathlib import Path
from pax_export.export._directory import replaced
for number in range(10**6):
    with replaced(Path(sys.argv[1]), overwrite=True) as directory:
        for name in "ab":
            (directory / name).write_text(str(number))
    if not number:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.05])
def test_a_killed_process_leaves_one_whole_export(tmp_path, delay):
    path = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    first, second = ((path / name).read_text() for name in "ab")
    assert first == second
