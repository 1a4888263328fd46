"""What layers begin with: jax's own numbers, from few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pax_export as pax
from pax_export.core import filled_array, sample_padded
from tests.closeness import assert_close

SHAPES = [(), (1,), (0, 3), (7,), (3, 4), (2, 3, 5, 7), (31, 33), (1024,), (1025,), (300, 301)]
KEY = jax.random.key(5)


def as_jax_draws(key, shape, scale):
    return jax.random.normal(key, shape) * scale


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3), np.array([1, 2], np.uint32)])
def test_numbers_are_those_of_jax_bit_for_bit(key):
    for shape in SHAPES:
        for scale in (0.02, 1 / np.sqrt(7)):
            values = sample_padded(jax.random.normal, key, shape, scale)
            expected = as_jax_draws(key, shape, scale)
            assert values.dtype == expected.dtype and not values.committed
            assert np.array_equal(values, expected), (shape, scale)


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.uniform])
def test_half_precision(draw):
    values = sample_padded(lambda key, shape: draw(key, shape, "bfloat16"), KEY, (5, 3))
    assert values.dtype == "bfloat16" and np.array_equal(values, draw(KEY, (5, 3), "bfloat16"))


@pytest.fixture
def sizes():
    return []


@pytest.fixture
def draw(sizes):
    return lambda key, shape: sizes.append(shape) or np.zeros(shape)


def test_few_sizes_are_compiled(draw, sizes):
    for size in range(1, 1025):
        sample_padded(draw, KEY, (size,))
    assert set(sizes) == {(1024,)}
    sizes.clear()
    wanted = range(1025, 100_000, 371)
    for size in wanted:
        sample_padded(draw, KEY, (size,))
    assert len(set(sizes)) == 6 + 3
    assert all(size <= got < 2 * size for size, (got,) in zip(wanted, sizes))
    assert all(got <= 1.25 * size for size, (got,) in zip(wanted, sizes) if size > 1 << 16)
    sample_padded(draw, KEY, (4096, 1025))  # a large array is drawn as it is
    assert sizes[-1] == (4096, 1025)


def test_what_jax_draws_in_another_way_it_draws_itself(draw, sizes):
    shape = (3, 5)
    keys = [jax.random.key(1, impl="rbg"), jax.device_put(KEY, jax.devices()[0])]
    for key in keys:
        sample_padded(draw, key, shape)
        assert sizes.pop() == shape
    sample_padded(draw, KEY, shape)
    assert sizes.pop() == (1024,)
    if hasattr(jax, "threefry_partitionable"):
        with jax.threefry_partitionable(False):
            sample_padded(draw, KEY, shape)
        assert sizes.pop() == shape
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sample_padded(draw, KEY, shape)
    assert sizes.pop() == shape


def test_in_a_trace_it_is_what_jax_does():
    def make(key):
        return sample_padded(jax.random.normal, key, (3, 4), 0.5), filled_array((3,), 2)

    made, twos = jax.jit(make)(KEY)
    # XLA may round the product of both otherwise, as it does for jax's own.
    assert np.array_equal(made, jax.jit(lambda key: as_jax_draws(key, (3, 4), 0.5))(KEY))
    assert np.array_equal(twos, [2, 2, 2])
    assert jax.vmap(make)(jax.random.split(KEY, 6))[0].shape == (6, 3, 4)
    assert jax.eval_shape(make, KEY)[0].shape == (3, 4)
    closed = jax.make_jaxpr(lambda: make(KEY))()
    assert not closed.consts or closed.consts[0].shape == ()  # the key; nothing was computed


@pytest.mark.parametrize("dtype", [float, "float32", "bfloat16", "int32"])
def test_a_filled_array(dtype):
    values = filled_array((2, 3), 1, dtype)
    assert values.dtype == jnp.full((2, 3), 1, dtype).dtype and not values.committed
    assert np.array_equal(values, jnp.ones((2, 3), dtype))


def test_with_numbers_of_64_bits():
    with jax.enable_x64(True):
        values = sample_padded(jax.random.normal, KEY, (3, 5), 0.3)
        assert values.dtype == np.float64
        assert np.array_equal(values, as_jax_draws(KEY, (3, 5), 0.3))
        assert filled_array((2,), 1).dtype == np.float64


def layers_of(size):
    linear = [pax.Linear(size, size + 3), pax.Embed(7, size), pax.Conv2D(3, size, 3)]
    return [*linear, pax.BatchNorm1D(size), pax.LayerNorm(size), pax.RMSNorm(size)]


def test_layers_compile_nothing_for_a_shape_that_is_new():
    layers_of(8)
    programs = []

    def heard(name, seconds, **about):
        programs.extend([name] if "compile" in name else [])

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        for size in (5, 6, 7, 9):
            layers_of(size)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert not programs


def test_transfers_that_nobody_sees_may_be_refused():
    with jax.transfer_guard("disallow"):
        values = sample_padded(jax.random.normal, KEY, (3,), 0.5)
    assert np.array_equal(values, as_jax_draws(KEY, (3,), 0.5))


KEYS = jax.random.split(KEY, 3)


@pytest.mark.parametrize("keys", [KEYS, jax.random.key_data(KEYS)], ids=["typed", "legacy"])
@pytest.mark.parametrize("shape", [(), (0, 2), (31, 33)])
def test_many_layers_begin_with_the_numbers_of_each(keys, shape):
    def ours(key):
        return sample_padded(jax.random.normal, key, shape, 0.3)

    expected = np.stack([as_jax_draws(key, shape, 0.3) for key in keys])
    values = jax.vmap(ours)(keys)
    assert values.dtype == expected.dtype and np.array_equal(values, expected)
    for build in (jax.jit(jax.vmap(ours)), jax.vmap(jax.jit(ours))):
        assert_close(build(keys), expected)
    assert_close(jax.vmap(jax.vmap(ours))(jnp.stack([keys, keys])), np.stack([expected, expected]))


def test_many_layers_need_the_programs_of_one(draw, sizes):
    for shape in [(3, 5), (7,), (4, 4)]:
        jax.vmap(lambda key, shape=shape: sample_padded(draw, key, shape))(KEYS)
        # Once without numbers, then each layer what a layer alone draws.
        assert sizes == [shape, (1024,), (1024,), (1024,)]
        sizes.clear()


def test_nothing_of_it_is_in_a_traced_program():
    def build(keys):
        return jax.vmap(lambda key: sample_padded(jax.random.normal, key, (3, 4)))(keys)

    assert "custom_vmap" not in str(jax.make_jaxpr(build)(KEYS))
