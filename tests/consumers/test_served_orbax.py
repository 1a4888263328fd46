"""Serves what was exported through orbax's interface, where there is no jax.

    PAX_EXPORT_ARTIFACTS=DIR python -m pytest --confcutdir=tests/consumers \
        tests/consumers/test_served_orbax.py

DIR holds what `test_exported_orbax.py` wrote there.
"""

from __future__ import annotations

import functools
import importlib

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.consumers import artifacts

ROOT = artifacts.served_root()

tf = importlib.import_module("tensorflow")

FOLDERS = sorted(file.parent for file in ROOT.rglob("orbax_cases.npz"))
each_batch = pytest.mark.parametrize("batch", artifacts.BATCHES)


@functools.cache
def load(folder):
    return tf.saved_model.load(str(folder / "model")), dict(np.load(folder / "orbax_cases.npz"))


def near(got, expected):
    assert_close(got, expected, rtol=2e-4, atol=2e-4)


def test_there_are_exports():
    assert FOLDERS


@each_batch
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_signatures(folder, batch):
    model, cases = load(folder)
    x = tf.constant(cases[f"{batch}/x"])
    output = model.signatures["serving_default"](x=x)
    near(output["scores.0"], cases[f"{batch}/scores.0"])
    near(output["scores.1"], cases[f"{batch}/scores.1"])
    np.testing.assert_array_equal(output["places"], cases[f"{batch}/places"])
    for key in ("spread", "again"):
        (value,) = model.signatures[key](x=x).values()
        near(value, cases[f"{batch}/spread"])


@each_batch
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_text_goes_past_the_model(folder, batch):
    model, cases = load(folder)
    lines = [",".join(map(repr, map(float, row))) for row in cases[f"{batch}/x"]]
    output = model.signatures["text"](text=tf.constant(lines))
    np.testing.assert_array_equal(output["places"], cases[f"{batch}/places"])
    assert [line.decode() for line in output["text"].numpy()] == lines


@each_batch
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_calls_keep_their_structure_and_gradients(folder, batch):
    model, cases = load(folder)
    leaves = {variable.name: variable for variable in model.computation_module._tf_var_leaves}
    wanted = {key.split("/")[-1]: cases[key] for key in cases if f"{batch}/gradient" in key}
    with tf.GradientTape() as tape:
        scores = model(tf.constant(cases[f"{batch}/x"]))["scores"]
        loss = 0.5 * tf.reduce_sum(scores[1] ** 2)
    variables = [leaves[f"{name}:0"] for name in wanted]
    for got, expected in zip(tape.gradient(loss, variables), wanted.values()):
        scale = np.abs(expected).max()
        assert_close(got / scale, expected / scale, rtol=2e-4, atol=2e-4)
