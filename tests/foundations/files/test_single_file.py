"""Exports that are one file: whole or not at all, and what killed saves leave is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pax_export._foundations.files import atomic, system
from pax_export.errors import ExportPathError
from tests.processes import python
from tests.refusals import refused


def ours(path):
    return (lambda name: False) if path.read_bytes() in (b"old", b"new") else None


def save(path, content=b"new", overwrite=False):
    with atomic.replace_file(path, ours if overwrite else None) as temporary:
        (temporary.parent / "beside").write_bytes(b"what a runtime leaves")
        temporary.write_bytes(content)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_appears_alone(tmp_path):
    save(tmp_path / "deep" / "model")
    assert (tmp_path / "deep" / "model").read_bytes() == b"new"
    assert names(tmp_path / "deep") == ["model"]


def test_overwrite_replaces(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with refused(ExportPathError, "overwrite=True"):
        save(path)
    assert path.read_bytes() == b"old"
    save(path, overwrite=True)
    assert (path.read_bytes(), names(tmp_path)) == (b"new", ["model"])


def test_whoever_comes_second_is_refused(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(ExportPathError):
        with atomic.replace_file(path, None) as temporary:
            temporary.write_bytes(b"second")
            path.write_bytes(b"first")
    assert (path.read_bytes(), names(tmp_path)) == (b"first", ["model"])


@pytest.mark.parametrize(
    "path", ["a\0b", "gs://bucket/net.html", Path("s3://bucket/net.html"), "x" * 300], ids=range(4)
)
def test_invalid_places_are_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with refused(ExportPathError, "where: "):
        save(Path(path))
    assert names(tmp_path) == []


def test_a_failed_write_keeps_the_old_file(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic.replace_file(tmp_path / "a" / "m", None):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
sys.modules["jax"] = None  # not needed, and slow
from pax_export._foundations.files import atomic
with atomic.replace_file(Path(sys.argv[1]), None) as temporary:
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "model"
    assert python("-c", program, path, check=False).returncode == -9
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".model.")
    with atomic.claim_temporary(path) as living:
        save(path)
        assert names(tmp_path) == [living.name, "model"]
    assert names(tmp_path) == ["model"]


def test_it_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(system, "sync", lambda path: seen.append((path.name, names(tmp_path))))
    save(tmp_path / "model")
    assert {name for name, _ in seen} >= {"model", tmp_path.name}
    assert all("model" not in there for name, there in seen if name == "model")
    assert seen[-1] == (tmp_path.name, [seen[0][1][0], "model"])
