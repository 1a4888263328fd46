import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import conv_transpose, drawn


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (1, 3)]], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3), (5, 2), (3,)])
def test_numbers(padding, stride):
    padding = padding if isinstance(padding, str) else padding[: len(stride)]
    if len(stride) == 2:
        layer = pax.Conv2DTranspose(3, 4, (3, 4), stride, padding)
    else:
        layer = pax.Conv1DTranspose(3, 4, 4, 3, padding)
    layer = layer.replace(bias=drawn(4, seed=1))
    x = drawn(2, *(5, 4)[: len(stride)], 3)
    expected = conv_transpose(x, np.asarray(layer.weight), stride, padding) + layer.bias
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


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
