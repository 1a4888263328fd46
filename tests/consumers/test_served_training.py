"""Trains and reads text where there is no jax; see `test_exported_training.py`.

Runs like `test_served.py`.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.closeness import assert_close
from tests.consumers import artifacts

ROOT = artifacts.served_root()
PROGRAM = Path(__file__).with_name("continue_training.py")

tf = importlib.import_module("tensorflow")


def folders(name, file):
    found = sorted(path.parent for path in ROOT.rglob(f"{name}/{file}"))
    assert found, f"{ROOT} holds no export {name!r}: run test_exported_training.py with it"
    return found


def test_training_goes_on_as_in_jax():
    found = folders("training", "steps.npz")
    pairs = [folder / file for folder in found for file in ("model", "steps.npz")]
    done = subprocess.run([sys.executable, PROGRAM, *pairs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for folder, line in zip(found, done.stdout.splitlines(), strict=True):
        got = json.loads(line)
        steps = np.load(folder / "steps.npz")
        losses = steps["losses"]
        assert_close(got["losses"], losses, rtol=1e-3)
        assert_close(got["logits"], steps["logits"], atol=1e-3)
        assert np.mean(losses[-3:]) < 0.8 * losses[0]
        rest = got["losses"][len(losses) // 2 :]
        assert_close(got["after_checkpoint"], rest, rtol=1e-6)
        assert_close(got["after_saving"], rest, rtol=1e-6)


def test_text_is_read():
    for folder in folders("text", "calls.json"):
        calls = json.loads((folder / "calls.json").read_text())
        serve = tf.saved_model.load(str(folder / "model")).signatures["serving_default"]
        results = serve(text=tf.constant(calls["texts"]))
        assert_close(results["score"], calls["scores"], atol=1e-6)
        moods = [b"sad" if score < 0 else b"happy" for score in calls["scores"]]
        assert results["mood"].numpy().tolist() == moods
