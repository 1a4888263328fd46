"""TFLite's constants as a source."""

from __future__ import annotations

import numpy as np
import pytest

from pax_export.export import spec, to_tflite
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.export.models import affine, affine_params


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tflite") / "net.tflite"
    to_tflite((affine_params(), affine), path, spec("2, 3"), validate=False)
    return path


def test_the_constants_of_a_model(model):
    kernel = np.asarray(affine_params()["w"])
    with open_source(model) as source:
        assert source.kind == "tflite"
        arrays = [entry.read() for entry in source.entries.values()]
        assert any(np.array_equal(array, kernel) or np.array_equal(array, kernel.T)
                   for array in arrays)  # fmt: skip


def test_integers_with_scales(tmp_path):
    """A model as the tools of TensorFlow quantise it, compared with its interpreter."""
    tf = pytest.importorskip("tensorflow")
    kernel = tf.constant(np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32))
    call = tf.function(lambda x: x @ kernel, [tf.TensorSpec((1, 64))])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([call.get_concrete_function()])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    (tmp_path / "net.tflite").write_bytes(converter.convert())
    with open_source(tmp_path / "net.tflite") as source:
        (entry,) = (each for each in source.entries.values() if len(each.shape) == 2)
        assert entry.note.startswith("int8, scaled")
        assert_close(entry.read(), kernel.numpy().T, atol=0.02)
        whole = entry.read()
    with open_source(tmp_path / "net.tflite", keep_quantized=True) as source:
        name = next(name for name, each in source.entries.items() if len(each.shape) == 2)
        integers, scales, zeros = (
            source.entries[f"{name}{end}"].read() for end in ("", ".scales", ".zeros")
        )
        assert integers.dtype == np.int8
        assert_close((integers - zeros[:, None]) * scales[:, None], whole)
