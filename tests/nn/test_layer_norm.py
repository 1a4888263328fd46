import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn, normalised
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
