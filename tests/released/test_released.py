"""What every released version wrote is read, as docs/stability.md promises."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.released.write import FOLDER, STEP, make_model

VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/numbers.npz"))


@pytest.fixture(scope="module", params=VERSIONS)
def files(request, tmp_path_factory):
    """The files of one version, where a reader may write beside them."""
    folder = tmp_path_factory.mktemp("released") / request.param
    return shutil.copytree(FOLDER / request.param, folder)


@pytest.fixture
def numbers(files):
    with np.load(files / "numbers.npz") as arrays:
        return dict(arrays)


def test_there_are_versions():
    assert "0.1.0" in VERSIONS


def test_saved_model_with_its_gradient(files, numbers):
    import tensorflow as tf

    assert_close(pax.export.load(files / "saved_model")(numbers["x"]), numbers["y"])
    served, x = tf.saved_model.load(str(files / "saved_model")), tf.constant(numbers["x"])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = served.signatures["serving_default"](x=x)["output"]
        loss = tf.reduce_sum(y**2)
    assert_close(y, numbers["y"])
    assert_close(tape.gradient(loss, x), numbers["gradient"])


def test_bundle_with_its_gradient(files, numbers):
    bundle = pax.export.load(files / "bundle")
    assert_close(bundle(numbers["x"]), numbers["y"])
    assert_close(jax.grad(lambda x: (bundle(x) ** 2).sum())(numbers["x"]), numbers["gradient"])


def test_bundle_by_its_portable_files_alone(files, numbers):
    """As it is read when jax does not read its own bytes any more."""
    again = shutil.copytree(files / "bundle", files / "renewed", dirs_exist_ok=True)
    pax.export.renew(again)
    assert_close(pax.export.load(again)(numbers["x"]), numbers["y"])


def test_tflite(files, numbers):
    assert_close(pax.export.load(files / "model.tflite")(numbers["x"]), numbers["y"])


@pytest.mark.parametrize("name", ["saved_model", "bundle", "model.tflite"])
def test_report(files, name):
    report = pax.export.Report.read(files / name)
    assert report.versions["pax_export"] == files.name
    (signature,) = report.signatures.values()
    assert signature.inputs[0].shape == ("batch", "length", 3)


def test_weights(files, numbers):
    model = pax.load_weights(make_model(), files / "weights.safetensors").eval()
    assert_close(model(numbers["x"]), numbers["y"])


def test_checkpoint(files, numbers):
    with pax.checkpoint.Checkpoints(files / "checkpoints") as checkpoints:
        state = checkpoints.restore(model=make_model())
    assert state.step == STEP
    assert_close(state["model"].eval()(numbers["x"]), numbers["y"])
