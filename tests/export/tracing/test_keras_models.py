"""Keras models with the jax backend go to the exporters as they are."""

import os
import subprocess
import sys

import keras
import pytest

from pax_export import errors
from pax_export.export import spec, to_onnx
from tests.warm import ROOT


def test_exported_as_they_are(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.export.tracing.keras_models", str(tmp_path)],
        env={**os.environ, "KERAS_BACKEND": "jax"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr


@pytest.mark.skipif(keras.config.backend() == "jax", reason="this process has the jax backend")
def test_another_backend_is_refused(tmp_path):
    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(errors.InvalidArgumentTypeError) as caught:
        to_onnx(net, tmp_path / "net.onnx", spec("batch, 4"))
    assert caught.value.got == "Sequential"
    assert "KERAS_BACKEND" in caught.value.write
