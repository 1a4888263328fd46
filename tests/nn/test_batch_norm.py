import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn, normalised
from tests.refusals import refused

CASES = [
    (pax.BatchNorm1D, "NWC", (4, 5, 3)),
    (pax.BatchNorm1D, "NCW", (4, 3, 5)),
    (pax.BatchNorm2D, "NHWC", (4, 5, 2, 3)),
    (pax.BatchNorm2D, "NCHW", (4, 3, 5, 2)),
]
each_case = pytest.mark.parametrize(("cls", "data_format", "shape"), CASES)


#: Features without a place in space: statistics over the batch alone.
WITHOUT_SPACE = [(pax.BatchNorm1D, data_format, (7, 3)) for data_format in ("NWC", "NCW")]


def statistics(x, data_format):
    channel = data_format.index("C") if x.ndim > 2 else 1
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    x = np.asarray(x, np.float64)
    return x.mean(axes, keepdims=True), x.var(axes, keepdims=True), axes


@pytest.mark.parametrize(("cls", "data_format", "shape"), CASES + WITHOUT_SPACE)
def test_numbers_in_train_and_eval_mode(cls, data_format, shape):
    norm = cls(3, decay_rate=0.8, data_format=data_format)
    affine = [drawn(*norm.scale.shape, seed=seed) for seed in (5, 6)]
    norm = norm.replace(scale=affine[0], offset=affine[1])
    if len(shape) == 2:
        affine = [each.reshape(1, 3) for each in affine]
    mean = variance = None
    for step in range(3):
        x = drawn(*shape, seed=step)
        new_mean, new_variance, axes = statistics(x, data_format)
        mean = new_mean if step == 0 else 0.8 * mean + 0.2 * new_mean
        variance = new_variance if step == 0 else 0.8 * variance + 0.2 * new_variance
        norm, y = norm % x
        expected = normalised(x, axes) * affine[0] + affine[1]
        assert_close(y, expected, rtol=1e-4, atol=1e-4)
        form = norm.scale.shape
        assert_close(norm.ema_mean.averages, mean.reshape(form), rtol=1e-5, atol=1e-6)
        assert_close(norm.ema_var.averages, variance.reshape(form), rtol=1e-5)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * affine[0] + affine[1]
    assert_close(norm.eval()(x), expected, rtol=1e-4, atol=1e-4)
    if len(shape) == 2:  # the same layer as with one place in space
        place = 3 - data_format.index("C")
        found = norm.eval()(np.expand_dims(x, place)).squeeze(place)
        assert_close(found, expected, rtol=1e-4, atol=1e-4)


@each_case
def test_arrays(cls, data_format, shape):
    norm = cls(3, data_format=data_format)
    expected = tuple(3 if letter == "C" else 1 for letter in data_format)
    assert norm.scale.shape == norm.offset.shape == expected
    assert norm.ema_mean.averages.shape == norm.ema_var.averages.shape == expected
    assert norm.pytree_attributes == ("scale", "offset", "ema_mean", "ema_var")
    bare = cls(3, create_scale=False, create_offset=False, data_format=data_format)
    assert bare.scale is bare.offset is None
    assert [leaf.shape for leaf in jax.tree.leaves(norm.parameters())] == [expected] * 2
    assert jax.tree_util.tree_leaves(bare.parameters()) == []
    assert (bare % drawn(*shape))[1].shape == shape


def test_before_training_eval_mode_takes_mean_0_and_variance_1():
    x = drawn(2, 3, 4)
    assert_close(pax.BatchNorm1D(4, eps=0.0).eval()(x), x, rtol=1e-6)


def test_gradients_flow_through_the_statistics():
    """The sum of a normalised batch is constant, so nothing flows back to it."""
    norm = pax.BatchNorm1D(3)
    gradient = jax.grad(lambda x: (norm % x)[1].sum())(drawn(4, 5, 3))
    assert np.abs(gradient).max() < 1e-5
    numeric_x, step = drawn(2, 2, 3), 1e-2
    loss = jax.jit(lambda x: jnp.sum((norm % x)[1] ** 3))
    gradient = jax.grad(loss)(numeric_x)
    moved = numeric_x.copy()
    moved[0, 0, 0] += step
    back = numeric_x.copy()
    back[0, 0, 0] -= step
    slope = (loss(moved) - loss(back)) / (2 * step)
    assert abs(slope - gradient[0, 0, 0]) < 0.05


def test_variance_is_never_negative():
    """mean(x²) - mean² is about -4e-5 for this constant channel, below -eps."""
    x = jnp.full((5, 5, 1), 10.1)
    norm, y = pax.BatchNorm1D(1) % x
    assert np.abs(y).max() < 1e-2
    assert 0 <= float(norm.ema_var.averages[0, 0, 0]) < 1e-9
    assert np.isfinite(norm.eval()(x)).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_inputs_have_sound_statistics(dtype):
    """Their squares overflow in float16, and their sums lose all digits."""
    x = (drawn(64, 64, 2) * 100 + 500).astype(dtype)
    mean, variance, axes = statistics(np.asarray(x, np.float64), "NWC")
    norm, y = pax.BatchNorm1D(2) % x
    assert norm.ema_mean.averages.dtype == norm.ema_var.averages.dtype == jnp.float32
    assert_close(norm.ema_mean.averages, mean, rtol=1e-5)
    assert_close(norm.ema_var.averages, variance, rtol=1e-3)
    assert_close(y, normalised(x.astype(np.float64), axes), rtol=1e-3, atol=1e-3)


def test_output_dtype_is_what_input_scale_and_offset_promote_to():
    x = jnp.ones((2, 3, 4), jnp.float16)
    half = pax.BatchNorm1D(4)
    half = half.replace(scale=half.scale.astype("float16"), offset=half.offset.astype("float16"))
    bare = pax.BatchNorm1D(4, False, False)
    for norm, dtype in ((pax.BatchNorm1D(4), "float32"), (half, "float16"), (bare, "float16")):
        assert (norm % x)[1].dtype == norm.eval()(x).dtype == dtype
    for integers in (jnp.ones((2, 3, 4), jnp.int32), jnp.ones((2, 4), jnp.int32)):
        assert bare.eval()(integers).dtype == pax.BatchNorm1D(4).eval()(integers).dtype == "float32"


def test_repr_and_summary():
    norm = pax.BatchNorm2D(3, create_offset=False, decay_rate=0.99, data_format="NCHW", name="b")
    line = (
        "(b) BatchNorm2D(num_channels=3, create_scale=True, create_offset=False, "
        "data_format=NCHW, decay_rate=0.99)"
    )
    assert repr(norm) == norm.summary() == line
    assert norm.summary(return_list=True) == [line]


def test_draws_no_key():
    pax.seed_rng_key(42)
    pax.BatchNorm2D(3), pax.EMA(jnp.ones(2), 0.5), pax.Lambda(jnp.tanh), pax.Identity()
    assert int(pax.next_rng_key()[1]) == 686579304


def test_an_input_that_does_not_fit():
    norm = pax.BatchNorm1D(3)
    title = repr(norm)
    with refused(ValueError, "batch", where=str(title), got="shape (3,)"):
        norm % drawn(3)
    assert norm.eval()(drawn(3)).shape == (3,)  # one example has no statistics, and needs none
    with refused(ValueError, "channels"):
        norm % drawn()
    with refused(ValueError, "channels"):
        norm % drawn(4, 2)
    with refused(ValueError, where=str(title), got="shape (4, 5, 1)"):
        norm % drawn(4, 5, 1)  # which would broadcast
    with pytest.raises(AssertionError):
        pax.BatchNorm2D(3, data_format="NCHW").eval()(drawn(4, 5))
    with refused(ValueError, where=repr(pax.BatchNorm2D(3).eval()), got="shape (4, 3)"):
        pax.BatchNorm2D(3).eval()(drawn(4, 3))
    with refused(ValueError, "x[None]"):
        pax.BatchNorm2D(3) % drawn(4, 5, 3)


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 3)])
def test_one_value_for_each_channel_has_no_statistics(shape):
    norm, x = pax.BatchNorm1D(3), jnp.ones(shape)
    with refused(ValueError, "eval()", "outside of vmap", got=f"shape {(1, 1, 3)}"):
        norm % x
    with refused(ValueError, "outside of vmap"):
        jax.vmap(lambda x: norm % x)(x[None])
    assert norm.eval()(x).shape == shape
    assert (norm % jnp.ones((1, 2, 3)))[1].shape == (1, 2, 3)
