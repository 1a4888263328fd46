"""What a save takes the place of: what is ours, what is empty, and nothing else."""

from __future__ import annotations

import os
import socket
import threading

import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export._foundations.files import atomic, checksums
from pax_export._foundations.files.own_files import now_in
from pax_export.checkpoint import Checkpoints
from pax_export.errors import ExportPathError, InvalidArgumentTypeError
from pax_export.export import load, renew, retarget, spec, to_onnx, to_saved_model, to_stablehlo
from tests.refusals import refused


def ours(path):
    """A folder with a mark, and the files a and deep/b; a file that begins so, too."""
    if path.is_file():
        return (lambda name: False) if path.read_text().startswith("ours") else None
    return {"mark", "a", "deep/b"}.__contains__ if (path / "mark").exists() else None


def write_folder(path, overwrite=ours):
    with atomic.replace_directory(path, overwrite) as folder:
        (folder / "mark").write_text("ours")


def write_file(path, overwrite=ours):
    with atomic.replace_file(path, overwrite) as file:
        file.write_text("ours, new")


def content(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.*")}


def test_a_folder_of_a_user_is_refused_and_named(tmp_path):
    path = tmp_path / "proj"
    (path / "src").mkdir(parents=True)
    (path / "data.csv").write_text("1,2,3")
    with refused(ExportPathError, where=str(path), got="a directory with data.csv, src"):
        write_folder(path)
    assert content(path) == {"data.csv": b"1,2,3"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["proj"]


def test_files_of_a_user_in_a_folder_of_ours(tmp_path):
    path = tmp_path / "export"
    write_folder(path)
    (path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (path / name).write_text("x")
    (path / "empty" / "folder").mkdir(parents=True)
    write_folder(path)
    assert os.listdir(path) == ["mark"]
    (path / "notes").mkdir()
    (path / "notes" / "why.md").write_text("because")
    (path / "link").symlink_to("notes")
    with refused(ExportPathError, where=str(path), got="link, notes/why.md"):
        write_folder(path)
    for number in range(9):
        (path / f"{number}.txt").touch()
    with refused(ExportPathError, got="0.txt, 1.txt, 2.txt, 3.txt, 4.txt and more"):
        write_folder(path)


def test_an_empty_folder_and_an_empty_file_are_filled(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    write_folder(tmp_path / "folder")
    write_file(tmp_path / "file")
    assert (tmp_path / "folder" / "mark").exists()
    assert (tmp_path / "file").read_text() == "ours, new"


def test_files_created_during_the_write_are_kept(tmp_path):
    write_folder(tmp_path / "a")
    with refused(ExportPathError, got="late.csv"):
        with atomic.replace_directory(tmp_path / "a", ours):
            (tmp_path / "a" / "late.csv").write_text("1")
    with refused(ExportPathError, got='a file that begins with b"a user\'s"'):
        with atomic.replace_file(tmp_path / "b", ours) as file:
            file.write_text("ours")
            (tmp_path / "b").write_text("a user's")
    assert (tmp_path / "b").read_text() == "a user's"
    copied = now_in(tmp_path / "a")
    (tmp_path / "a" / "later.csv").write_text("1")
    with refused(ExportPathError, got="later.csv"):
        write_folder(tmp_path / "a", copied)


def test_a_file_of_a_user_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2,3")
    (tmp_path / "nowhere").symlink_to("gone")
    path = tmp_path / "data.csv"
    with refused(ExportPathError, where=str(path), got="a file that begins with b'1,2,3'"):
        write_file(path)
    with refused(ExportPathError, got="a link to gone"):
        write_file(tmp_path / "nowhere")
    assert (tmp_path / "data.csv").read_text() == "1,2,3"


def make_fifo(path):
    os.mkfifo(path)
    return "a FIFO (a named pipe)"


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(os.path.relpath(path))
    return "a socket"


def make_device(path):
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root may make a device")
    return "a character device"


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device])
def test_named_pipes_and_devices_are_refused(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    kind = make(path)
    before = path.lstat()
    with pytest.raises(ExportPathError) as caught:
        write_file(path)
    assert caught.value.got == kind
    with pytest.raises(ExportPathError) as caught:
        write_folder(path)
    assert caught.value.got == kind
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_hashes_that_are_a_pipe_are_not_waited_for(tmp_path):
    assert checksums.names(tmp_path) is None
    (tmp_path / "a").write_bytes(b"")
    checksums.write(tmp_path)
    assert checksums.names(tmp_path) == {"a"}
    (tmp_path / checksums.FILE).unlink()
    os.mkfifo(tmp_path / checksums.FILE)
    assert checksums.names(tmp_path) is None
    with pytest.raises(ExportPathError):
        checksums.check(tmp_path)


def test_links_in_a_loop(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for write in (write_folder, write_file):
        for path in (tmp_path / "one" / "model", tmp_path / "one"):
            with refused(ExportPathError, str(tmp_path / "one")):
                write(path)


def test_several_threads_save_to_one_file_and_one_folder(tmp_path):
    failed = []

    def save():
        try:
            for _ in range(20):
                write_file(tmp_path / "file")
                write_folder(tmp_path / "folder")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_scratch_is_private_and_cleans_up_after_the_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.tempfile, "tempdir", str(tmp_path))
    (tmp_path / ".pax_export.0123456789ab.part" / "deep").mkdir(parents=True)
    with atomic.scratch() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.listdir(tmp_path) == [folder.name]
        with atomic.scratch() as other:
            assert folder.is_dir() and other != folder
    assert not os.listdir(tmp_path)


# --- paths of another kind are refused by name, wherever there is one ---------------------


NET = pax.Linear(2, 2)
CALLS = {
    "to_saved_model": lambda path: to_saved_model(jnp.sin, path, spec("n")),
    "to_stablehlo": lambda path: to_stablehlo(jnp.sin, path, spec("n")),
    "to_onnx": lambda path: to_onnx(jnp.sin, path, spec("n")),
    "load": load,
    "renew": renew,
    "retarget": retarget,
    "save_weights": lambda path: pax.save_weights(NET, path),
    "load_weights": lambda path: pax.load_weights(NET, path),
}


@pytest.mark.parametrize("path", [None, 3, b"bytes"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_path_is_refused(name, path):
    with refused(InvalidArgumentTypeError, where="path", got=f"{type(path).__name__}: {path!r}"):
        CALLS[name](path)


def test_the_directory_of_checkpoints():
    with refused(InvalidArgumentTypeError, where="directory", got="NoneType: None"):
        Checkpoints(None)
