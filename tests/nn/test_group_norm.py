import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn, normalised


def by_groups(x, groups, axes=None):
    """Normalises channels-last input, each group of channels by itself."""
    parts = np.split(x, groups, axis=-1)
    axes = tuple(range(1, x.ndim)) if axes is None else axes
    return np.concatenate([normalised(part, axes) for part in parts], axis=-1)


@pytest.mark.parametrize(
    ("groups", "shape"), [(1, (2, 6)), (2, (2, 5, 6)), (3, (2, 3, 4, 6)), (6, (2, 5, 6))]
)
def test_numbers(groups, shape):
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


def test_operations_come_in_one_order():
    """In this order the last bits are those of dm-haiku (checked against 0.0.17)."""
    norm = pax.GroupNorm(2, 6)
    norm = norm.replace(scale=drawn(6, seed=1), offset=drawn(6, seed=2))
    x = jnp.asarray(drawn(3, 4, 6))
    grouped = x.reshape(3, 4, 2, 3)
    mean = jnp.mean(grouped, (1, 3), keepdims=True)
    variance = jnp.var(grouped, (1, 3), keepdims=True)
    y = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    assert (norm(x) == y * norm.scale + norm.offset).all()


def test_arrays():
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


def test_repr():
    assert repr(pax.GroupNorm(2, 4, create_scale=False, name="norm")) == (
        "(norm) GroupNorm(groups=2, num_channels=4, axis=slice(1, None, None), "
        "create_scale=False, create_offset=True, data_format=channels_last)"
    )
