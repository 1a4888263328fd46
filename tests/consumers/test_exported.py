"""Exports the models that other processes must be able to serve.

With PAX_EXPORT_ARTIFACTS set, they are left there for `test_served.py`, which
runs where TensorFlow is and jax is not, and compares all numbers: nothing is validated here.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from pax_export.export import retarget, spec, to_saved_model
from tests.consumers import artifacts, foreign
from tests.consumers.models import MODELS, compiled, mlp


@jax.jit
def gradients(params, x):
    """Of half the sum of squares of the logits."""

    def loss(params, x):
        return 0.5 * (mlp(params, x)["logits"] ** 2).sum()

    by_params, by_x = jax.grad(loss, (0, 1))(params, x)
    flat, _ = jax.tree_util.tree_flatten_with_path(by_params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): g for path, g in flat}
    return {**named, "x": by_x}


def shaped(shape, batch):
    """An input for a batch; another length goes with another batch."""
    sizes = {"batch": batch, "length": 3 + batch % 4}
    words = shape.split(", ")
    return [sizes[word] if word in sizes else int(word) for word in words]


def cases(name, run, shape, argument="x"):
    random = np.random.default_rng(0)
    arrays = {}
    for batch in artifacts.batches(name):
        x = random.normal(size=shaped(shape, batch)).astype(np.float32)
        arrays[f"{batch}/in/{argument}"] = x
        for key, value in run(x).items():
            arrays[f"{batch}/out/{key}"] = np.asarray(value)
    return arrays


def check(report):
    assert tuple(map(int, report.oldest_tensorflow.split("."))) == (2, 15)


@pytest.mark.parametrize("name", MODELS)
def test_export_for_consumers(name, tmp_path):
    folder = (artifacts.root() or tmp_path) / name
    make, shape, options = MODELS[name]
    model = make()
    report = to_saved_model(
        model, folder / "model", spec(shape), overwrite=True, validate=False, **options
    )
    check(report)
    (argument,) = [entry.name for entry in report.signatures["serving_default"].inputs]
    arrays = cases(name, compiled(model), shape, argument)
    if name == "trainable":
        for batch in artifacts.batches(name):
            for key, value in gradients(model[0], arrays[f"{batch}/in/x"]).items():
                arrays[f"{batch}/gradient/{key}"] = np.asarray(value)
    np.savez(folder / "cases.npz", **arrays)
    assert str(Path.cwd()).encode() not in (folder / "model" / "saved_model.pb").read_bytes()


def test_mend_for_consumers(tmp_path):
    """What jax2tf wrote fails in every TensorFlow to 2.20; mended, it is served by all."""
    folder = (artifacts.root() or tmp_path) / "mended"
    foreign.save(tmp_path / "old")
    check(retarget(tmp_path / "old", out=folder / "model", overwrite=True))
    run = jax.jit(lambda x: foreign.model(foreign.PARAMS, x))
    np.savez(folder / "cases.npz", **cases("mended", run, "batch, 5"))


def test_every_name_is_exported():
    assert {*MODELS, "mended"} == set(artifacts.NAMES)
