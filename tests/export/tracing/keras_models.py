"""Exports Keras models with the jax backend; `test_keras_models` runs it in its own process.

Keras takes its backend from the environment, once for each process.
"""

import functools
import sys
from pathlib import Path

import jax
import keras
import numpy as np
from keras import layers

from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.quantization import quantize
from tests.closeness import assert_close

RANDOM = np.random.default_rng(0)
FORMATS = [(to_saved_model, ""), (to_stablehlo, ""), (to_tflite, ".tflite"), (to_onnx, ".onnx")]


class Reader(keras.Model):
    """A subclass whose `call` has no argument `training`."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(11, 8, mask_zero=True)
        self.attend = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()

    def call(self, ids):
        x = self.embed(ids)
        return self.norm(x + self.attend(x, x, use_causal_mask=True))


@functools.cache
def recurrent():
    net = keras.Sequential(
        [
            layers.Input((4, 8)),
            layers.Masking(),
            layers.Bidirectional(layers.LSTM(5)),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    x = RANDOM.normal(size=(4, 4, 8)).astype("f")
    x[1, 2:] = 0
    return net, spec("batch, 4, 8"), x


def two_inputs():
    left, right = layers.Input((8,), name="left"), layers.Input((3,), name="right")
    joined = layers.Concatenate()([left, right])
    net = keras.Model({"left": left, "right": right}, {"sum": layers.Dense(2)(joined)})
    x = {
        name: RANDOM.normal(size=(4, size)).astype("f")
        for name, size in (("left", 8), ("right", 3))
    }
    return net, {"left": spec("batch, 8"), "right": spec("batch, 3")}, x


def subclass():
    net, x = Reader(), RANDOM.integers(0, 11, (3, 7)).astype("int32")
    net(x)
    return net, spec("batch, length", np.int32), x


def exported(folder):
    for build in (recurrent, two_inputs, subclass):
        net, inputs, x = build()
        mode = {} if build is subclass else {"training": False}
        expected = jax.jit(functools.partial(net, **mode))(x)
        for export, suffix in FORMATS if build is subclass else [(to_onnx, ".onnx")]:
            path = folder / f"{build.__name__}{export.__name__}{suffix}"
            report = export(net, path, inputs, validate=False)
            assert report.model == type(net).__name__
            kinds = [each.trainable for each in report.variables]
            assert len(kinds) == len(net.variables)
            for ours, theirs in zip(jax.tree.leaves(load(path)(x)), jax.tree.leaves(expected)):
                assert_close(ours, theirs)


def quantized(folder):
    net, inputs, x = recurrent()
    for told in ({}, {"activations": "dynamic"}):
        (params, function), report = quantize(net, [x], **told)
        assert report.difference.mean < 0.05 * report.difference.scale, report
        assert len(report.leaves) >= 3, report
        options = {"accuracy_level": 1, "overwrite": True, "validate": False}
        to_onnx((params, function), folder / "small.onnx", inputs, **options)
        expected = jax.jit(function)(params, x)
        assert_close(load(folder / "small.onnx")(x), expected, rtol=1e-4, atol=1e-5)


def refused(folder):
    net, inputs, _ = recurrent()
    try:
        to_onnx(net, folder / "net.onnx", inputs, kwargs={"training": True})
        raise AssertionError("exported in train mode")
    except errors.StateChangeError as error:
        assert "moving_mean" in error.where
    try:
        to_onnx(Reader(), folder / "net.onnx", inputs)
        raise AssertionError("exported without variables")
    except errors.InvalidArgumentTypeError as error:
        assert "model.build" in error.write


def stateful(folder):
    """Recurrent layers whose states, and seeds, are no weights."""
    x = RANDOM.normal(size=(1, 3, 8)).astype("f")
    for name, layer in {
        "rnn": lambda: layers.RNN(layers.GRUCell(4), stateful=True),
        "both": lambda: layers.Bidirectional(layers.LSTM(4, stateful=True)),
        "nested": lambda: keras.Sequential([layers.SimpleRNN(4, stateful=True)]),
    }.items():
        net = keras.Sequential([layers.Input(batch_shape=(1, 3, 8)), layer()])
        try:
            to_onnx(net, folder / f"{name}.onnx", spec("1, 3, 8"))
            raise AssertionError("exported with a state that never changes")
        except errors.StateChangeError as error:
            assert "rnn_state" in error.where
        to_saved_model(net, folder / name, spec("1, 3, 8"), state="update", validate=False)
        served = load(folder / name)
        for _ in range(3):
            assert_close(served(x), np.asarray(net(x)), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    exported(folder)
    quantized(folder)
    refused(folder)
    stateful(folder)
