"""The nets of `file_nets` in Keras, for files of its converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from benchmarks.file_nets import DIM, EFFICIENT, HEADS, LENGTH, MOBILE

_IMAGE = (224, 224, 3)


def _conv(x: Any, features: int, size: int = 1, stride: int = 1, activation: Any = None) -> Any:
    x = layers.Conv2D(features, size, stride, "same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return x if activation is None else layers.Activation(activation)(x)


def _resnet(counts: tuple[int, ...], deep: bool) -> Any:
    x = start = keras.Input(_IMAGE)
    x = layers.MaxPool2D(3, 2, "same")(_conv(x, 64, 7, 2, "relu"))
    for group, count in enumerate(counts):
        outside = (256 if deep else 64) * 2**group
        for number in range(count):
            stride, width = 2 if number == 0 and group else 1, outside // 4
            h = _conv(
                x, width if deep else outside, 1 if deep else 3, 1 if deep else stride, "relu"
            )
            h = _conv(h, width, 3, stride, "relu") if deep else h
            h = _conv(h, outside, 1 if deep else 3)
            if x.shape[-1] != outside or stride != 1:
                x = _conv(x, outside, 1, stride)
            x = layers.ReLU()(layers.Add()([x, h]))
    return keras.Model(start, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


def _inverted(table: Any, activation: str, excites: bool) -> Any:
    x = start = keras.Input(_IMAGE)
    x = _conv(x, 32, 3, 2, activation)
    for wider, features, count, stride, size in table:
        for number in range(count):
            inside, step, h = x.shape[-1], stride if number == 0 else 1, x
            if wider != 1:
                h = _conv(h, inside * wider, activation=activation)
            h = layers.DepthwiseConv2D(size, step, "same", use_bias=False)(h)
            h = layers.Activation(activation)(layers.BatchNormalization()(h))
            if excites:
                gate = layers.GlobalAveragePooling2D(keepdims=True)(h)
                gate = layers.Conv2D(max(1, inside // 4), 1, activation=activation)(gate)
                h = h * layers.Conv2D(inside * wider, 1, activation="sigmoid")(gate)
            h = _conv(h, features)
            x = layers.Add()([x, h]) if inside == features and step == 1 else h
    x = layers.GlobalAveragePooling2D()(_conv(x, 1280, activation=activation))
    return keras.Model(start, layers.Dense(1000)(x))


def _transformer(causal: bool) -> Any:
    x = start = keras.Input((LENGTH, DIM))
    for _ in range(6):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, DIM // HEADS)(h, h, use_causal_mask=causal)
        h = layers.Dense(4 * DIM)(layers.LayerNormalization()(x))
        x = x + layers.Dense(DIM)(ops.gelu(h, approximate=False))
    return keras.Model(start, x)


def _lstm() -> Any:
    start = keras.Input((64, 64))
    return keras.Model(start, layers.LSTM(128, return_sequences=True)(start))


def _unet() -> Any:
    x = start = keras.Input(_IMAGE)
    kept = []
    for features in (16, 32):
        x = _conv(x, features, 3, activation="relu")
        kept.append(x)
        x = layers.MaxPool2D(2)(x)
    x = _conv(x, 64, 3, activation="relu")
    for features in (32, 16):
        x = layers.Conv2DTranspose(features, 2, 2)(x)
        x = _conv(layers.Concatenate()([x, kept.pop()]), features, 3, activation="relu")
    return keras.Model(start, layers.Conv2D(2, 1)(x))


NETS: dict[str, Callable[[], Any]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), True),
    "mobilenet_v2": lambda: _inverted(MOBILE, "relu6", False),
    "like_efficientnet": lambda: _inverted(EFFICIENT, "swish", True),
    "encoder": lambda: _transformer(False),
    "causal_transformer": lambda: _transformer(True),
    "lstm": _lstm,
    "unet": _unet,
}


def write(name: str, path: str) -> None:
    """Writes the file of Keras' converter, for a batch of one."""
    model = NETS[name]()
    shape = tf.TensorSpec((1, *model.input.shape[1:]), tf.float32)
    function = tf.function(lambda x: model(x, training=False)).get_concrete_function(shape)
    # Without the model beside it, whose variables it would keep instead of constants.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    Path(path).write_bytes(converter.convert())
