import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import conv_transpose, drawn
from tests.refusals import refused


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (1, 3)]], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3), (5, 2)])
def test_numbers_2d(padding, stride):
    layer = pax.Conv2DTranspose(3, 4, (3, 4), stride, padding).replace(bias=drawn(4, seed=1))
    x = drawn(2, 3, 4, 3)
    expected = conv_transpose(x, np.asarray(layer.weight), stride, padding) + layer.bias
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 1),)], ids=str)
def test_numbers_1d(padding):
    layer = pax.Conv1DTranspose(3, 4, 4, 3, padding).replace(bias=drawn(4, seed=1))
    x = drawn(2, 5, 3)
    expected = conv_transpose(x, np.asarray(layer.weight), (3,), padding) + layer.bias
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cls", "formats", "shape"), [
    (pax.Conv1DTranspose, ("NWC", "NCW"), (2, 5, 4)),
    (pax.Conv2DTranspose, ("NHWC", "NCHW"), (2, 3, 4, 4)),
])  # fmt: skip
def test_channels_first_is_the_same_layer(cls, formats, shape):
    last, first = [
        cls(4, 6, 3, stride=2, data_format=name, rng_key=jax.random.key(0)) for name in formats
    ]
    last, first = last.replace(bias=drawn(6)), first.replace(bias=drawn(6))
    x = drawn(*shape)
    y = first(np.moveaxis(x, -1, 1))
    assert_close(np.moveaxis(y, 1, -1), last(x), rtol=1e-5, atol=1e-5)


def test_initial_values():
    layer = pax.Conv2DTranspose(50, 60, 4, rng_key=jax.random.PRNGKey(0))
    weight_key, _ = jax.random.split(jax.random.PRNGKey(0))
    assert layer.weight.shape == (4, 4, 60, 50)
    expected = jax.random.normal(weight_key, (4, 4, 60, 50)) / np.sqrt(16 * 50)
    assert_close(layer.weight, expected, rtol=1e-6)
    assert (layer.bias == 0).all() and layer.bias.shape == (60,)
    assert pax.Conv1DTranspose(2, 3, 3, with_bias=False).pytree_attributes == ("weight",)


def test_repr():
    assert repr(pax.Conv2DTranspose(4, 6, 3, 2)) == (
        "Conv2DTranspose(in_features=4, out_features=6, data_format=NHWC, padding=SAME, "
        "stride=(2, 2), with_bias=True)"
    )


@pytest.mark.parametrize(("message", "build"), [
    ("'SAME' or 'VALID'", lambda: pax.Conv2DTranspose(1, 1, 3, padding="FULL")),
    ("for each of 2", lambda: pax.Conv2DTranspose(1, 1, 3, padding=[(1, 1)])),
    ("'NHWC' or 'NCHW'", lambda: pax.Conv2DTranspose(1, 1, 3, data_format="NWC")),
    ("Conv1DTranspose.in_features", lambda: pax.Conv1DTranspose(0, 3, 3)),
    ("must have 3 axes, NWC", lambda: pax.Conv1DTranspose(2, 3, 3)(drawn(2))),
    ("2 channels on axis 2", lambda: pax.Conv1DTranspose(2, 3, 3)(drawn(1, 2, 4))),
])  # fmt: skip
def test_what_makes_no_sense(message, build):
    with refused(AssertionError, message) as error:
        build()
    assert isinstance(error.value, ValueError)
