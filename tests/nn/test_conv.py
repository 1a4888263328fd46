"""Convolutions and transposed convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import conv, conv_transpose, drawn
from tests.refusals import refused


@pytest.mark.parametrize(
    ("padding", "stride", "rate", "groups"),
    [
        ("SAME", (1, 1), (1, 1), 1),
        ("SAME", (2, 1), (1, 1), 2),
        ("SAME", (1, 2), (2, 1), 1),
        ("VALID", (1, 1), (1, 1), 2),
        ("VALID", (1, 2), (2, 1), 1),
        ([(1, 0), (2, 3)], (2, 1), (1, 1), 1),
        ([(1, 0), (2, 3)], (1, 2), (2, 1), 2),
        ("SAME", (2,), (1,), 1),
        ("SAME", (1,), (3,), 1),
        ("VALID", (1,), (3,), 1),
        ([(2, 1)], (1,), (1,), 1),
    ],
)
def test_numbers(padding, stride, rate, groups):
    if len(stride) == 2:
        layer = pax.Conv2D(4, 6, (3, 2), stride, rate, padding, feature_group_count=groups)
    else:
        layer = pax.Conv1D(4, 6, 3, *stride, *rate, padding)
    layer = layer.replace(bias=drawn(6, seed=1))
    x = drawn(2, *(7, 6)[: len(stride)], 4)
    expected = conv(x, np.asarray(layer.weight), stride, rate, padding, groups) + layer.bias
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cls", "formats", "shape"), [
    (pax.Conv1D, ("NWC", "NCW"), (2, 5, 4)),
    (pax.Conv2D, ("NHWC", "NCHW"), (2, 5, 6, 4)),
    (pax.Conv1DTranspose, ("NWC", "NCW"), (2, 5, 4)),
    (pax.Conv2DTranspose, ("NHWC", "NCHW"), (2, 3, 4, 4)),
])  # fmt: skip
def test_channels_first_is_the_same_layer(cls, formats, shape):
    last, first = [
        cls(4, 6, 3, stride=2, data_format=name, rng_key=jax.random.key(0)) for name in formats
    ]
    assert (last.weight == first.weight).all()
    assert first.weight.shape[-2:] == ((6, 4) if "Transpose" in cls.__name__ else (4, 6))
    last, first = last.replace(bias=drawn(6)), first.replace(bias=drawn(6))
    x = drawn(*shape)
    y = first(np.moveaxis(x, -1, 1))
    assert_close(np.moveaxis(y, 1, -1), last(x), rtol=1e-5, atol=1e-5)


def test_initial_values():
    layer = pax.Conv2D(20, 200, (5, 4), feature_group_count=2)
    assert layer.weight.shape == (5, 4, 10, 200)
    assert abs(float(layer.weight.std()) - (5 * 4 * 10) ** -0.5) < 0.002
    assert (layer.bias == 0).all() and layer.bias.shape == (200,)
    assert pax.Conv2D(2, 3, 3, with_bias=False).bias is None


def test_key_is_split_for_weight_and_bias():
    key = jax.random.PRNGKey(1)
    layer = pax.Conv1D(1, 2, 4, b_init=jax.random.normal, rng_key=key)
    weight_key, bias_key = jax.random.split(key)
    assert (layer.weight == jax.random.normal(weight_key, (4, 1, 2)) / 2).all()
    assert (layer.bias == jax.random.normal(bias_key, (2,))).all()


@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("weight_dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_promote(x_dtype, weight_dtype):
    layer = jax.tree_util.tree_map(lambda x: x.astype(weight_dtype), pax.Conv1D(1, 1, 3))
    assert layer(jnp.ones((1, 4, 1), x_dtype)).dtype == jnp.result_type(x_dtype, weight_dtype)


def test_repr():
    assert repr(
        pax.Conv2D(4, 6, (3, 5), (2, 1), (1, 2), [(1, 1), (2, 2)], feature_group_count=2, name="cc")
    ) == (
        "(cc) Conv2D(in_features=4, out_features=6, kernel_shape=(3, 5), "
        "padding=[(1, 1), (2, 2)], stride=(2, 1), rate=(1, 2), with_bias=True, "
        "data_format=NHWC, feature_group_count=2)"
    )
    assert repr(pax.Conv1D(1, 2, 3, with_bias=False)) == (
        "Conv1D(in_features=1, out_features=2, kernel_shape=(3,), padding=SAME, "
        "with_bias=False, data_format=NWC)"
    )


def test_an_input_that_does_not_fit():
    layer = pax.Conv2D(1, 2, 3, with_bias=False)
    title = (
        "Conv2D(in_features=1, out_features=2, kernel_shape=(3, 3), padding=SAME, "
        "with_bias=False, data_format=NHWC)"
    )
    with refused(AssertionError, where=str(title), got="shape (8, 1)"):
        layer(jnp.ones((8, 1)))
    with refused(ValueError, where=str(title), got="shape (2, 8, 8, 3)"):
        layer(jnp.ones((2, 8, 8, 3)))


# --- conv transpose ------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (1, 3)]], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3), (5, 2), (3,)])
def test_numbers_of_conv_transpose(padding, stride):
    padding = padding if isinstance(padding, str) else padding[: len(stride)]
    if len(stride) == 2:
        layer = pax.Conv2DTranspose(3, 4, (3, 4), stride, padding)
    else:
        layer = pax.Conv1DTranspose(3, 4, 4, 3, padding)
    layer = layer.replace(bias=drawn(4, seed=1))
    x = drawn(2, *(5, 4)[: len(stride)], 3)
    expected = conv_transpose(x, np.asarray(layer.weight), stride, padding) + layer.bias
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_initial_values_of_conv_transpose():
    layer = pax.Conv2DTranspose(50, 60, 4, rng_key=jax.random.PRNGKey(0))
    weight_key, _ = jax.random.split(jax.random.PRNGKey(0))
    assert layer.weight.shape == (4, 4, 60, 50)
    expected = jax.random.normal(weight_key, (4, 4, 60, 50)) / np.sqrt(16 * 50)
    assert_close(layer.weight, expected, rtol=1e-6)
    assert (layer.bias == 0).all() and layer.bias.shape == (60,)
    assert pax.Conv1DTranspose(2, 3, 3, with_bias=False).pytree_attributes == ("weight",)


def test_repr_of_conv_transpose():
    assert repr(pax.Conv2DTranspose(4, 6, 3, 2)) == (
        "Conv2DTranspose(in_features=4, out_features=6, data_format=NHWC, padding=SAME, "
        "stride=(2, 2), with_bias=True)"
    )
