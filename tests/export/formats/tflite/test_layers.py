"""Convolutions and pools that are one operator of TFLite, and the layout of nets."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

import pax_export as pax
from pax_export.export import load, spec, to_tflite
from tests.closeness import assert_close

X = np.random.default_rng(0).normal(size=(2, 9, 8, 3)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 4, 3, 7)).astype(np.float32)


def pooled(function, start, padding, window=(1, 3, 2, 1), strides=(1, 2, 2, 1)):
    return lambda x: lax.reduce_window(x, start, function, window, strides, padding)


def largest(padding, **window):
    return pooled(lax.max, -jnp.inf, padding, **window)


def summed(padding):
    return pooled(lax.add, 0.0, padding)


def spread(strides, padding, numbers=("NHWC", "HWIO", "NHWC")):
    def apply(x):
        return lax.conv_transpose(x, KERNEL, strides, padding, dimension_numbers=numbers)

    return apply


def blocks(strides):
    """A kernel as large as the strides, so that no two of its places overlap."""
    kernel = np.random.default_rng(5).normal(size=(*strides, 3, 7)).astype(np.float32)
    return lambda x: lax.conv_transpose(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


EDGES = ((0, 0), (1, 1), (1, 0), (0, 0))
#: A function, and the operators that it becomes, of an image of fixed size.
LAYERS = {
    "largest": (largest("VALID"), ["MAX_POOL_2D"]),
    "largest_same": (largest("SAME"), ["MAX_POOL_2D"]),
    "largest_in_edges": (largest(EDGES), ["PADV2", "MAX_POOL_2D"]),
    "largest_of_relu": (lambda x: largest(EDGES)(jax.nn.relu(x)), ["RELU", "PAD", "MAX_POOL_2D"]),
    "features_first": (
        lambda x: largest("SAME", window=(1, 1, 3, 2), strides=(1, 1, 2, 2))(
            x.transpose(0, 3, 1, 2)
        ).mean((2, 3)),
        ["MAX_POOL_2D", "MEAN"],
    ),
    "sum": (summed("VALID"), ["AVERAGE_POOL_2D", "MUL"]),
    "sum_same": (summed("SAME"), ["PAD", "AVERAGE_POOL_2D", "MUL"]),
    "mean": (lambda x: summed("VALID")(x) / 6.0, ["AVERAGE_POOL_2D"]),
    "spread_same": (spread((2, 2), "SAME"), ["TRANSPOSE_CONV"]),
    "spread_valid": (spread((2, 3), "VALID"), ["TRANSPOSE_CONV"]),
    "spread_with_gaps": (spread((5, 1), "VALID"), ["TRANSPOSE_CONV", "PAD"]),
    "spread_in_edges": (
        spread((2, 2), ((5, 4), (6, 1))),
        ["TRANSPOSE_CONV", "STRIDED_SLICE", "PAD"],
    ),
    "spread_in_blocks": (blocks((2, 2)), ["CONV_2D", "DEPTH_TO_SPACE"]),
    "spread_and_scaled": (
        lambda x: spread((2, 2), "SAME")(x) * 2.0 + jnp.arange(7.0),
        ["TRANSPOSE_CONV"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, tmp_path):
    function, expected = LAYERS[name]
    for shape in ("2, 9, 8, 3", "n, 9, w, 3"):
        model = ({}, lambda params, x: function(x))
        to_tflite(model, tmp_path / "m.tflite", spec(shape), overwrite=True, validate=False)
        loaded = load(tmp_path / "m.tflite")
        assert_close(loaded(X), function(jnp.asarray(X)), rtol=1e-5, atol=1e-5)
        if shape == "2, 9, 8, 3":
            assert operators(loaded) == expected


def operators(loaded):
    details = loaded.runtime._get_ops_details()
    return [each["op_name"] for each in details if each["op_name"] != "DELEGATE"]


def test_a_net_with_features_first_has_one_transpose(tmp_path):
    random = np.random.default_rng(3)  # jax would compile a program for each shape
    shapes = jax.eval_shape(lambda: pax.nets.ResNet18(3, 10)).eval()
    net = jax.tree.map(
        lambda leaf: (
            random.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
            if leaf.size < 1000
            else random.normal(0.0, 0.03, leaf.shape).astype(leaf.dtype)
        ),
        shapes,
    )
    to_tflite(net, tmp_path / "m.tflite", spec("n, 3, 64, 64"))
    counts = Counter(operators(load(tmp_path / "m.tflite")))
    others = {"CONV_2D": 20, "ADD": 8, "MAX_POOL_2D": 1, "MEAN": 1, "FULLY_CONNECTED": 1}
    assert counts == others | {"TRANSPOSE": 1, "PAD": counts["PAD"]}


@pytest.mark.parametrize(
    ("kind", "size", "bound"), [("float16", 0.6, 1e-3), ("dynamic", 0.5, 0.03)]
)
def test_weights_of_every_kind_are_stored_small(kind, size, bound, tmp_path):
    layers = [pax.Conv2D(8, 32, 3, padding="SAME"), pax.BatchNorm2D(32), jax.nn.relu]
    layers += [pax.Conv2D(32, 64, 5, padding="SAME", feature_group_count=32)]
    layers += [lambda x: x.mean((1, 2)), pax.Linear(64, 32)]
    table = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    net = pax.Sequential(*layers).eval()
    model = ((net, table), lambda params, n: params[0](params[1][n]))
    numbers = np.arange(128, dtype=np.int32).reshape(2, 8, 8)
    expected = np.asarray(net(table[numbers]))
    plain = to_tflite(model, tmp_path / "plain.tflite", spec("n, 8, 8", "int32"))
    small = to_tflite(model, tmp_path / "m.tflite", spec("n, 8, 8", "int32"), quantize=kind)
    assert small.graph_bytes < size * plain.graph_bytes
    assert_close(load(tmp_path / "m.tflite")(numbers), expected, atol=bound * abs(expected).max())


# ``1 - x.T`` and ``1 / x.T`` keep their sides, whatever is moved or folded on the way.
POSITIVE = np.abs(np.random.default_rng(0).normal(size=(3, 8, 2))).astype(np.float32) + 0.5
W = np.abs(np.random.default_rng(1).normal(size=(2, 8))).astype(np.float32) + 0.5


def models(t):
    return {
        "number": 1 - t,
        "row": W[0] - t,
        "matrix": W - 0.1 * t,
        "negated": W + (-t),
        "quotient": 1 / t,
        "quotients": W / t,
        "powers": t**-2,
        "complement": special.erfc(t),
        "whole": 3 - t.astype(jnp.int32),
    }


@pytest.mark.parametrize("shape", ["batch, 8, 2", "3, 8, 2"])
def test_a_constant_stays_the_first_side(shape, tmp_path):
    def apply(params, x):
        return models(x.swapaxes(1, 2))

    to_tflite(({}, apply), tmp_path / "m.tflite", spec(shape), validate=False)
    found = load(tmp_path / "m.tflite")(POSITIVE)
    for name, expected in models(jnp.asarray(POSITIVE).swapaxes(1, 2)).items():
        assert_close(found[name], expected, rtol=1e-5)
