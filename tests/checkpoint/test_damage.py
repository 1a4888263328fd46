"""Checkpoints that were cut short, or of which a bit has flipped."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.checkpoint import Checkpoints
from tests.refusals import refused

# When orbax gives up on one array, tensorstore still tells it of others, in threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPES = jax.eval_shape(lambda: pax.Linear(64, 48))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint, the model in it, and its directory."""
    folder = tmp_path_factory.mktemp("whole")
    model = pax.Linear(64, 48)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model=model)
    return folder, model


def outcome(folder, model):
    """What restoring says: nothing if it is right; a wrong result is a failure."""
    try:
        restored = Checkpoints(folder).restore(model=SHAPES)["model"]
    except OSError as error:
        return str(error)
    except KeyError as error:  # the names themselves were damaged
        return str(error)
    np.testing.assert_array_equal(restored.weight, model.weight)
    np.testing.assert_array_equal(restored.bias, model.bias)
    return ""


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["cut", "removed", "flipped"])
def test_no_wrong_number_is_restored(whole, tmp_path, damage):
    folder, model = whole
    draw, told = np.random.default_rng(0), []
    for path in files(folder):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        damaged = copy / path.relative_to(folder)
        data = bytearray(damaged.read_bytes())
        if damage == "cut":
            damaged.write_bytes(data[: len(data) // 2])
        elif damage == "removed":
            damaged.unlink()
        else:
            data[draw.integers(len(data))] ^= 1 << draw.integers(8)
            damaged.write_bytes(data)
        told.append(outcome(copy, model))
        shutil.rmtree(copy)
    # Some files hold nothing that is read; the numbers are in one of the others.
    assert any("damaged" in message for message in told)
    assert all("damaged" in text for text in told if text)


def test_numbers_that_differ_from_those_that_were_saved(whole, tmp_path):
    folder, _ = whole
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    largest = max(files(copy), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)
    with refused(
        OSError,
        "checkpoint",
        f"where: model.weight: float32[64,48], in {copy}/1/model",
        "fix: another step",
    ):
        Checkpoints(copy).restore(model=SHAPES)


def test_a_number_that_names_no_checkpoint(tmp_path):
    (tmp_path / "7").mkdir()
    with refused(pax.errors.MissingCheckpointError, where=str(tmp_path), got="step None, found 7"):
        Checkpoints(tmp_path).restore(model=SHAPES)
    # It is no reason not to save, and is not the best.
    with Checkpoints(tmp_path, best="loss") as checkpoints:
        checkpoints.save(8, x=jnp.zeros(1), metrics={"loss": 1})
    assert checkpoints.best == 8
