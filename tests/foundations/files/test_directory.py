"""All or nothing: what is on disk after success, failure, and death."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from pax_export._foundations.files import atomic
from pax_export._foundations.files import system as system_calls
from pax_export._foundations.files.atomic import absolute, replace_directory
from pax_export.errors import ExportPathError, WeightsFileError
from tests.refusals import refused

IN_TWO_STEPS = pytest.mark.parametrize("can_exchange", [True, False])


@pytest.fixture
def system(monkeypatch, request):
    """A system that can, or cannot, exchange two directories in one step."""
    if not request.param:
        monkeypatch.setattr(system_calls, "rename2", lambda one, other, flag: False)
    return request.param


every_system = pytest.mark.parametrize("system", [True, False], indirect=True)


def ours(path):
    """What the exports of these tests hold."""
    return {"a", "b", "stale"}.__contains__


def write(path, text, overwrite=False):
    with replace_directory(path, ours if overwrite else None) as directory:
        for name in "ab":
            (directory / name).write_text(text)


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_a_new_directory_appears_whole(tmp_path):
    path = tmp_path / "deep" / "down"
    with replace_directory(path, None) as directory:
        (directory / "file").write_text("new")
        assert not path.exists()
    assert (path / "file").read_text() == "new"
    assert names(path.parent) == ["down"]
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777


def test_an_existing_directory_is_refused(tmp_path):
    write(tmp_path / "a", "old")
    with refused(ExportPathError, "overwrite=True"):
        write(tmp_path / "a", "new")
    assert (tmp_path / "a" / "a").read_text() == "old"


@every_system
def test_overwrite_replaces_and_leaves_no_stale_file(tmp_path, system):
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "stale").write_text("x")
    write(tmp_path / "a", "new", overwrite=True)
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["a", "b"]
    assert (tmp_path / "a" / "a").read_text() == "new"


@every_system
def test_overwrite_needs_nothing_to_be_there(tmp_path, system):
    write(tmp_path / "a", "new", overwrite=True)
    assert (tmp_path / "a" / "b").read_text() == "new"


def test_a_failed_write_keeps_the_old_file(tmp_path):
    write(tmp_path / "a", "old")
    with pytest.raises(KeyError), replace_directory(tmp_path / "a", ours) as directory:
        (directory / "file").write_text("half")
        raise KeyError
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "a").read_text() == "old"


def test_a_failure_leaves_no_new_parents(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(KeyError), replace_directory(tmp_path / "there" / "b" / "c", None):
        raise KeyError
    assert names(tmp_path) == ["there"]
    assert not names(tmp_path / "there")


@every_system
def test_whoever_comes_second_is_refused(tmp_path, system):
    with (
        refused(ExportPathError, "already"),
        replace_directory(tmp_path / "a", None) as mine,
    ):
        (mine / "a").write_text("second")
        write(tmp_path / "a", "first")
    assert (tmp_path / "a" / "a").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportPathError):
        write(tmp_path / "file" / "inside", "new")
    with refused(ExportPathError, got="a file"):
        write(tmp_path / "file", "new", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_link_is_not_replaced_but_may_lead_there(tmp_path):
    write(tmp_path / "real" / "1", "old")
    (tmp_path / "link").symlink_to("real/1")
    (tmp_path / "way").symlink_to("real")
    with refused(ExportPathError, got="a link to real/1"):
        write(tmp_path / "link", "new", overwrite=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    with refused(ExportPathError, "already"):
        write(tmp_path / "dangling", "new")
    write(tmp_path / "way" / "1", "new", overwrite=True)
    assert (tmp_path / "real" / "1" / "a").read_text() == "new"


@pytest.mark.parametrize("given", [".", "", "..", "../..", "./"])
def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch, given):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(ExportPathError):
        write(given, "new", overwrite=True)
    with pytest.raises(ExportPathError):
        write(given, "new")
    assert here.is_dir()


@pytest.mark.parametrize(
    "given", ["out", "out/", "./out", "deep/../out", "../work/out", "link/x/../../work/out"]
)
def test_spellings_of_one_place(tmp_path, monkeypatch, given):
    here = tmp_path / "work"
    (here / "deep").mkdir(parents=True)
    (tmp_path / "real" / "x").mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(here)
    write(given, "new")
    assert absolute(given) == here / "out"
    assert names(here / "out") == ["a", "b"]


def test_the_root_of_a_file_system_is_not_replaced():
    with refused(ExportPathError, where="/"):
        write("/", "new", overwrite=True)


@pytest.mark.parametrize(
    "given", ["gs://bucket/model", "a\0b", "x" * 300, "/proc/here"], ids=range(4)
)
def test_invalid_places_are_refused(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    with refused(ExportPathError, "where: "):
        write(given, "new")
    assert not names(tmp_path)


def test_a_directory_that_may_not_be_written_to(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):  # pytest keeps these to the user that runs it
        if parent.stat().st_mode & 0o005 != 0o005 and parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        with refused(ExportPathError, where=str(closed / "a")):
            write(closed / "a", "new")
    finally:
        os.seteuid(user)


def test_an_error_of_the_block_leaves_it_clean(tmp_path):
    write(tmp_path / "a", "old")
    with pytest.raises(OSError, match="No space left"):
        with replace_directory(tmp_path / "a", ours) as directory:
            (directory / "a").write_text("half")
            raise OSError(28, "No space left on device")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a" / "a").read_text() == "old"


def test_errors_name_the_path_and_not_the_temporary(tmp_path):
    for replace, name in ((replace_directory, "a"), (atomic.replace_file, "b")):
        path = tmp_path / name
        with refused(WeightsFileError, where=f"{path}: x, in {path}/c"):
            with replace(path, None) as place:
                folder = place.parent if name == "b" else place
                raise WeightsFileError("It fails.", where=f"{place}: x, in {folder}/c")
    assert not names(tmp_path)


# Death.


def die_at(step, path, can_exchange):
    """Saves, and dies before the given step of those that Python tells of."""
    left = step

    def watch(event, arguments):
        nonlocal left
        if event != "os.kill" and event.split(".")[0] in ("os", "open", "shutil", "ctypes"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if not can_exchange:
        system_calls.rename2 = lambda one, other, flag: False
    sys.addaudithook(watch)
    write(path, "new", overwrite=True)
    os._exit(0)


@IN_TWO_STEPS
@pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_whatever_step_is_the_last_one_export_is_whole(tmp_path, can_exchange):
    path = tmp_path / "a"
    seen, steps = set(), 0
    while True:
        shutil.rmtree(path, ignore_errors=True)
        write(path, "old")
        child = os.fork()
        if not child:
            try:
                die_at(steps, path, can_exchange)
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        if not can_exchange and not path.exists():
            atomic.sweep(tmp_path)  # what the next save does first
            seen.add("aside")
        texts = {(path / name).read_text() for name in "ab"}
        assert texts in ({"old"}, {"new"})
        seen |= texts
        write(path, "next", overwrite=True)
        assert names(tmp_path) == ["a"]
        steps += 1
    assert steps > 10
    assert {"old", "new"} | (set() if can_exchange else {"aside"}) == seen


@IN_TWO_STEPS
def test_several_processes_save_to_one_place(tmp_path, can_exchange):
    program = (
        "import sys; from pathlib import Path; sys.modules['jax'] = None  # not needed, and slow\n"
        "from pax_export._foundations.files import atomic, system\n"
        "if sys.argv[3] == 'False': system.rename2 = lambda one, other, flag: False\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(40):\n"
        "    ours = lambda path: lambda name: True\n"
        "    with atomic.replace_directory(sys.argv[1], ours) as directory:\n"
        "        for name in 'ab': (directory / name).write_text(sys.argv[2])\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "a", text, str(can_exchange)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for text in ("one", "two")
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=900)
        assert writer.returncode == 0, errors
    first, second = ((tmp_path / "a" / name).read_text() for name in "ab")
    assert first == second
    assert first in ("one", "two")
    assert names(tmp_path) == ["a"]


def test_the_work_of_a_living_save_is_not_removed(tmp_path):
    with replace_directory(tmp_path / "a", ours) as mine:
        (mine / "a").write_text("mine")
        write(tmp_path / "a", "another's")
        assert mine.is_dir()
        (mine / "b").write_text("mine")
    assert (tmp_path / "a" / "a").read_text() == "mine"
    assert names(tmp_path) == ["a"]


def test_only_leftovers_of_saves_are_removed(tmp_path):
    dead, other = tmp_path / ".a.0123456789ab.part", tmp_path / ".b.0123456789ab.part"
    similar = [
        tmp_path / name for name in (".a.part", ".a.x123456789ab.part", "a.0123456789ab.part")
    ]
    for each in (dead, other, *similar):
        each.mkdir()
        (each / "file").write_text("x")
    write(tmp_path / "a", "new")
    assert names(tmp_path) == sorted(["a", *(each.name for each in similar)])


def test_an_old_export_without_heir_comes_back(tmp_path):
    write(tmp_path / ".a.0123456789ab.old", "old")
    with refused(ExportPathError, "already"):
        write(tmp_path / "a", "new")
    assert (tmp_path / "a" / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(directory):
        raise OSError(95, "not supported")

    monkeypatch.setattr(system_calls, "lock", no_locks)
    (tmp_path / ".a.0123456789ab.part").mkdir()
    write(tmp_path / "a", "new")
    assert names(tmp_path) == [".a.0123456789ab.part", "a"]


@pytest.mark.parametrize("error", [FileNotFoundError, BlockingIOError])
def test_a_folder_that_another_save_takes_for_a_leftover_is_made_anew(tmp_path, monkeypatch, error):
    lock, taken = system_calls.lock, []

    def lose_first(directory):
        if taken:
            return lock(directory)
        taken.append(directory)
        directory.rmdir()
        raise error

    monkeypatch.setattr(system_calls, "lock", lose_first)
    write(tmp_path / "a", "new")
    assert taken and names(tmp_path) == ["a"]


def test_everything_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(system_calls.os, "fsync", lambda handle: events.append(
        os.readlink(f"/proc/self/fd/{handle}").replace(str(tmp_path), "").rpartition(".part")[2]
    ))  # fmt: skip
    move = atomic.move_into_place
    monkeypatch.setattr(
        atomic, "move_into_place", lambda *args: (events.append("move"), move(*args))
    )
    with replace_directory(tmp_path / "a", None) as directory:
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("x")
    assert events == ["/deep/file", "/deep", "", "move", ""]
