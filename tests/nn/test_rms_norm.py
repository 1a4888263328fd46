"""RMSNorm and GatedDense against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import sigmoid
from tests.refusals import refused

X = np.random.RandomState(0).standard_normal((2, 3, 5)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_output_has_unit_root_mean_square(offset):
    norm = pax.RMSNorm(5, 1e-3, offset)
    expected = X / np.sqrt((X.astype(float) ** 2).mean(-1, keepdims=True) + 1e-3)
    assert_close(norm(X), expected)
    scale = np.arange(5, dtype=np.float32)
    assert_close(norm.replace(scale=jnp.asarray(scale))(X), expected * (scale + offset))


def test_halves_are_squared_in_float32_and_come_back():
    large = jnp.full((2, 5), 6e4, jnp.float16)  # whose square is no float16
    found = pax.RMSNorm(5)(large)
    assert found.dtype == jnp.float16
    assert_close(found, np.ones((2, 5)), rtol=1e-3)


def test_another_number_of_channels_is_named():
    with refused(pax.errors.InvalidArgumentError, "4 channels on axis -1"):
        pax.RMSNorm(4)(X)


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_tanh"])
def test_gated_output(activation):
    layer = pax.GatedDense(5, 7, activation, with_bias=True)
    gate, up = (X @ np.asarray(part.weight, float) for part in (layer.gate, layer.up))
    opened = {
        "silu": gate * sigmoid(gate),
        "relu": np.maximum(gate, 0),
        "gelu_tanh": gate * sigmoid(2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)),
    }[activation]
    assert_close(layer(X), opened * up @ np.asarray(layer.down.weight, float), rtol=3e-6)


def test_an_unknown_activation_is_named():
    with refused(pax.errors.InvalidArgumentError, "where: GatedDense.activation\n  got: 'swish'"):
        pax.GatedDense(5, 7, "swish")


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_begins_anew_as_it_began(offset):
    layer = pax.RMSNorm(3, scale_offset=offset)
    trained = layer.replace(scale=layer.scale + 5)
    assert_close(trained.at("scale").init(jax.random.key(0)).scale, layer.scale)
