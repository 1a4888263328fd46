"""Where checkpoints lie, what is deleted with them, and what is read back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from pax_export.checkpoint import Checkpoints, _checkpoint, _orbax
from tests.refusals import refused

MODEL = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, model=MODEL)
    checkpoints.wait()


@pytest.mark.parametrize("name", ["lr=[0.1]", "a]b", "[", "what?", "all*", "{x}", "a\\b"])
def test_a_path_that_is_a_pattern(tmp_path, name):
    (tmp_path / "whatX").mkdir()
    folder = tmp_path / name / "run"
    with Checkpoints(folder, keep=2) as checkpoints:
        save(checkpoints, 1, 2, 3)
        checkpoints.delete(2)
    assert sorted(os.listdir(folder)) == ["3"]
    restored = Checkpoints(folder).restore(model=MODEL)["model"]
    assert (restored["w"] == MODEL["w"]).all()
    stored = Checkpoints(folder).open().on_disk("model", MODEL)
    assert (stored["b"].read() == 1).all()
    with Checkpoints(folder) as again:
        save(again, 4)
    assert again.steps == (3, 4)


def test_a_path_that_is_a_pattern_where_no_other_leads_there(tmp_path, monkeypatch):
    monkeypatch.setattr(_orbax, "OPEN", "/nowhere/{}")
    with refused(
        OSError,
        got="a path with [ ]",
        write="a path without these characters, in any of its directories",
    ):
        save(Checkpoints(tmp_path / "lr=[0.1]"), 1)
    assert not os.listdir(tmp_path / "lr=[0.1]")


def test_unreadable_checkpoints_are_refused(tmp_path, monkeypatch):
    def broken(directory, wanted):
        raise ValueError("no such array")

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(_checkpoint._orbax, "read_arrays", broken)
    checkpoints.save(1, model=MODEL)
    with refused(
        OSError,
        got="ValueError: no such array",
        where=f"model.b: float32[3], in {tmp_path}/1/model",
    ):
        checkpoints.wait()
    checkpoints.close()


def test_numbered_folders_of_others_are_kept(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "data.csv").write_text("1,2")
    (tmp_path / ".deleted" / "mine").mkdir(parents=True)
    (tmp_path / ".deleted" / "mine" / "file").write_text("x")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 4, 5)
        (tmp_path / "5" / "model" / "notes.txt").write_text("the best so far")
        save(checkpoints, 6, 7, 8)
        assert checkpoints.steps == (5, 8)
        for step, strange in ((3, "data.csv"), (5, "model/notes.txt")):
            with refused(OSError, "other") as caught:
                checkpoints.delete(step)
            assert caught.value.got == strange
            assert caught.value.where == str(tmp_path / str(step))
    assert (tmp_path / "3" / "data.csv").read_text() == "1,2"
    assert (tmp_path / "5" / "model" / "notes.txt").exists()
    assert (tmp_path / ".deleted" / "mine" / "file").exists()


def test_a_later_folder_of_others_is_no_checkpoint(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "2019").mkdir()
    (tmp_path / "2019" / "data.csv").write_text("1,2")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1, 2)
        assert (checkpoints.steps, checkpoints.latest) == ((2,), 2)
        assert checkpoints.restore(model=MODEL).step == 2
        with refused(OSError, "not a checkpoint", where=str(tmp_path / "7")):
            checkpoints.save(7, model=MODEL)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2", "2019", "7"]


def test_other_paths_are_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for name, got in (("file", "Not a directory"), ("one", "Too many levels of symbolic l")):
        for call in (lambda each: each.steps, lambda each: each.save(1, model=MODEL)):
            with pytest.raises(OSError) as caught:
                call(Checkpoints(tmp_path / name))
            assert caught.value.got.startswith(got)
    with refused(OSError, got="a path of another machine"):
        Checkpoints("gs://bucket/run")


def test_unknown_trees_are_refused_in_a_few_lines(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model={f"w{n}": jnp.ones(1) for n in range(140)}, optimizer=MODEL)
    target = {f"w{n}": jnp.ones(1) for n in range(140)}
    with refused(ValueError, got="modle; it has model, optimizer") as caught:
        checkpoints.restore(modle=target)
    assert str(caught.value) == (
        "The checkpoint has no tree with this name.\n"
        f"  where: {tmp_path}/1\n"
        "  got: modle; it has model, optimizer\n"
        "  fix: restore(model=...)"
    )
    assert len(caught.value.report.missing) == 140
    assert checkpoints.restore(strict=False, modle=target).report.loaded == ()


def test_threads_save_at_once_each_in_a_folder_of_its_own(tmp_path):
    """orbax numbers saves in a process, and mixed up those of several threads."""

    def work(number):
        with Checkpoints(tmp_path / str(number), asynchronous=number % 2 == 0) as checkpoints:
            save(checkpoints, 1)
            return (checkpoints.restore(model=MODEL)["model"]["w"] == MODEL["w"]).all()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_two_managers_of_one_thread_take_turns(tmp_path):
    with Checkpoints(tmp_path / "a") as one, Checkpoints(tmp_path / "b") as other:
        one.save(1, model=MODEL)
        other.save(1, model=MODEL)
        one.save(2, model=MODEL)
    assert (one.steps, other.steps) == ((1, 2), (1,))
