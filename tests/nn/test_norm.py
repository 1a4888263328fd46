"""LayerNorm, GroupNorm and RMSNorm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn, normalised, sigmoid
from tests.refusals import refused


@pytest.mark.parametrize(("axis", "axes"), [
    (-1, (2,)),
    (1, (1,)),
    ((1, 2), (1, 2)),
    ([0, -1], (0, 2)),
    (slice(1, None), (1, 2)),
    (slice(None, None, 2), (0, 2)),
])  # fmt: skip
def test_numbers(axis, axes):
    norm = pax.LayerNorm(4, axis, True, True)
    norm = norm.replace(scale=drawn(4, seed=1), offset=drawn(4, seed=2))
    x = drawn(2, 3, 4)
    expected = normalised(x, axes) * norm.scale + norm.offset
    assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


def test_defaults_are_those_of_the_field():
    norm = pax.LayerNorm(4)
    assert repr(norm) == repr(pax.LayerNorm(4, -1, True, True)) and norm.eps == 1e-5
    x = drawn(2, 3, 4)
    assert_close(norm(x), normalised(x, (2,)), rtol=1e-5, atol=1e-5)


def test_operations_come_in_one_order():
    """In this order the last bits are those of dm-haiku (checked against 0.0.17)."""
    norm = pax.LayerNorm(5, -1, True, True)
    norm = norm.replace(scale=drawn(5, seed=1), offset=drawn(5, seed=2))
    x = jnp.asarray(drawn(7, 5))
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    expected = norm.scale * jax.lax.rsqrt(variance + 1e-5) * (x - mean) + norm.offset
    assert (norm(x) == expected).all()


def test_arrays():
    norm = pax.LayerNorm(4, -1, True, True)
    assert (norm.scale == np.ones(4)).all() and (norm.offset == np.zeros(4)).all()
    bare = pax.LayerNorm(4, -1, False, False)
    assert bare.scale is bare.offset is None
    made = pax.LayerNorm(4, -1, True, True, 1e-3, jax.random.normal, jax.random.normal)
    assert not (made.scale == made.offset).any() and made.eps == 1e-3


def test_draws_one_key():
    pax.seed_rng_key(42)
    pax.LayerNorm(4, -1, False, False)
    assert int(pax.next_rng_key()[1]) == 119540832
    pax.seed_rng_key(42)
    pax.GroupNorm(2, 4)
    assert int(pax.next_rng_key()[1]) == 119540832


def test_scale_and_offset_from_outside():
    norm = pax.LayerNorm(4, -1, False, False)
    x, scale, offset = drawn(2, 3, 4), drawn(4, seed=1), drawn(2, 1, 4, seed=2)
    expected = normalised(x, (2,)) * scale + offset
    assert_close(norm(x, scale, offset), expected, rtol=1e-5, atol=1e-5)
    assert_close(norm(x, scale=2.0), 2 * normalised(x, (2,)), rtol=1e-5, atol=1e-5)


def test_scale_and_offset_from_outside_only_if_there_is_no_own():
    with refused(
        ValueError,
        where="LayerNorm(num_channels=4, axis=(-1,), create_scale=False, create_offset=True)",
        got="offset in the call",
    ):
        pax.LayerNorm(4, -1, False, True)(drawn(2, 4), offset=1.0)


def test_repr():
    assert repr(pax.LayerNorm(4, slice(1, None), True, False)) == (
        "LayerNorm(num_channels=4, axis=slice(1, None, None), create_scale=True, "
        "create_offset=False)"
    )


def test_initializers_of_absent_parameters_are_refused():
    with refused(ValueError, where="LayerNorm.scale_init", got="create_scale=False"):
        pax.LayerNorm(4, -1, False, True, scale_init=jax.random.normal)


@pytest.mark.parametrize("axis", ["last", None, 1.5, (0, "1")])
def test_axes_of_another_kind(axis):
    with refused(ValueError, where="LayerNorm.axis", got=f"{type(axis).__name__}: {axis!r}"):
        pax.LayerNorm(4, axis, True, True)


def test_another_number_of_channels():
    with refused(ValueError, "-1"):
        pax.LayerNorm(4, -1, True, True)(drawn(2, 1))


# --- group norm ----------------------------------------------------------------------


def by_groups(x, groups, axes=None):
    """Normalises channels-last input, each group of channels by itself."""
    parts = np.split(x, groups, axis=-1)
    axes = tuple(range(1, x.ndim)) if axes is None else axes
    return np.concatenate([normalised(part, axes) for part in parts], axis=-1)


@pytest.mark.parametrize(
    ("groups", "shape"), [(1, (2, 6)), (2, (2, 5, 6)), (3, (2, 3, 4, 6)), (6, (2, 5, 6))]
)
def test_numbers_of_group_norm(groups, shape):
    norm = pax.GroupNorm(groups, 6)
    norm = norm.replace(scale=drawn(6, seed=1), offset=drawn(6, seed=2))
    x = drawn(*shape)
    expected = by_groups(x, groups) * norm.scale + norm.offset
    assert_close(norm(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [4, 6])  # with 6, scaling the last axis would go unseen
def test_channels_first_is_the_same_layer(width):
    scale, offset = drawn(6, seed=1), drawn(6, seed=2)
    last = pax.GroupNorm(3, 6).replace(scale=scale, offset=offset)
    first = pax.GroupNorm(3, 6, data_format="channels_first").replace(scale=scale, offset=offset)
    x = drawn(2, 5, width, 6)
    y = first(np.moveaxis(x, -1, 1))
    assert_close(np.moveaxis(y, 1, -1), last(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("axis", "axes"), [
    ((1, 2), (1, 2)),
    ((1, 3), (1, 3)),
    (3, (3,)),
    (slice(2, None), (2, 3)),
    (-1, (3,)),
])  # fmt: skip
def test_axes_are_those_of_the_input(axis, axes):
    x = drawn(2, 3, 5, 6)
    norm = pax.GroupNorm(2, 6, axis, create_scale=False, create_offset=False)
    assert_close(norm(x), by_groups(x, 2, axes), rtol=1e-4, atol=1e-4)


def test_axes_of_channels_first():
    x = drawn(2, 3, 5, 6)
    norm = pax.GroupNorm(2, 6, (1, 3), data_format="NC...")  # channels and the last axis
    y = norm(np.moveaxis(x, -1, 1))
    expected = by_groups(x, 2, (2, 3))
    assert_close(np.moveaxis(y, 1, -1), expected, rtol=1e-4, atol=1e-4)


def test_operations_come_in_one_order_of_group_norm():
    """In this order the last bits are those of dm-haiku (checked against 0.0.17)."""
    norm = pax.GroupNorm(2, 6)
    norm = norm.replace(scale=drawn(6, seed=1), offset=drawn(6, seed=2))
    x = jnp.asarray(drawn(3, 4, 6))
    grouped = x.reshape(3, 4, 2, 3)
    mean = jnp.mean(grouped, (1, 3), keepdims=True)
    variance = jnp.var(grouped, (1, 3), keepdims=True)
    y = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    assert (norm(x) == y * norm.scale + norm.offset).all()


def test_arrays_of_group_norm():
    norm = pax.GroupNorm(2, 4, create_offset=False)
    assert (norm.scale == np.ones(4)).all() and not hasattr(norm, "offset")
    made = pax.GroupNorm(2, 4, scale_init=jax.random.normal, offset_init=jax.random.normal)
    assert not (made.scale == made.offset).any()
    assert jax.tree_util.tree_leaves(pax.GroupNorm(2, 4, -1, False, False)) == []


def test_names_of_data_formats():
    structure = jax.tree_util.tree_structure
    for long, short in (("channels_last", "N...C"), ("channels_first", "NC...")):
        first, second = [pax.GroupNorm(2, 4, data_format=name) for name in (long, short)]
        assert structure(first) == structure(second)


def test_repr_of_group_norm():
    assert repr(pax.GroupNorm(2, 4, create_scale=False, name="norm")) == (
        "(norm) GroupNorm(groups=2, num_channels=4, axis=slice(1, None, None), "
        "create_scale=False, create_offset=True, data_format=channels_last)"
    )


# --- rms norm ------------------------------------------------------------------------


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
