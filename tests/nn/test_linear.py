import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nn.reference import drawn
from tests.refusals import refused


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3), (2, 1, 2, 3), (0, 3)])
def test_numbers(shape):
    layer = pax.Linear(3, 5)
    x = drawn(*shape)
    expected = np.einsum("...i,io->...o", x.astype(np.float64), layer.weight) + layer.bias
    assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer(x).shape == (*shape[:-1], 5)


def test_without_a_bias_there_is_no_attribute():
    layer = pax.Linear(3, 5, with_bias=False)
    assert not hasattr(layer, "bias")
    assert layer.pytree_attributes == ("weight",)
    assert_close(layer(np.eye(3)), layer.weight)


def test_initial_numbers_are_the_same_with_every_jax():
    key = jax.random.PRNGKey(3)
    layer = pax.Linear(3, 500, rng_key=key)
    weight_key, bias_key = jax.random.split(key)
    assert (layer.weight == jax.random.normal(weight_key, (3, 500)) * (1 / math.sqrt(3))).all()
    assert (layer.bias == jax.random.normal(bias_key, (500,)) * (1 / math.sqrt(3))).all()
    assert layer.weight.dtype == layer.bias.dtype == jnp.float32


def test_draws_one_key_and_none_if_given():
    before = next_key_after(lambda: None)
    assert next_key_after(lambda: pax.next_rng_key()) == next_key_after(lambda: pax.Linear(1, 1))
    assert before == next_key_after(lambda: pax.Linear(1, 1, rng_key=jax.random.key(0)))


def next_key_after(draw):
    pax.seed_rng_key(42)
    draw()
    return int(pax.next_rng_key()[1])


def test_initializers_get_key_and_shape():
    seen = []

    def init(key, shape):
        seen.append((key.shape, shape))
        return jnp.ones(shape)

    layer = pax.Linear(3, 2, w_init=init, b_init=init)
    assert seen == [((2,), (3, 2)), ((2,), (2,))]
    assert float(layer(np.ones((1, 3)))[0, 0]) == 4.0


def test_repr():
    assert repr(pax.Linear(2, 3, name="fc")) == "(fc) Linear(in_dim=2, out_dim=3, with_bias=True)"


def test_sizes_may_be_numpy_integers():
    structure = jax.tree_util.tree_structure
    assert structure(pax.Linear(np.int64(2), np.int32(3))) == structure(pax.Linear(2, 3))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    layer = jax.tree_util.tree_map(lambda x: x.astype(dtype), pax.Linear(3, 2))
    assert layer(jnp.ones((1, 3), dtype)).dtype == dtype


def test_an_input_of_another_width():
    with refused(
        TypeError, where="Linear(in_dim=3, out_dim=2, with_bias=True)", got="shape (1, 4)"
    ) as error:
        pax.Linear(3, 2)(jnp.ones((1, 4)))
    assert isinstance(error.value, ValueError)


def test_sizes_must_be_positive_integers():
    with refused(TypeError, where="Linear.in_dim", got="bool: True"):
        pax.Linear(True, 3)
    with refused(AssertionError, where="Linear.in_dim", got="0"):
        pax.Linear(0, 2)
    with refused(TypeError, where="Linear.out_dim", got="float: 2.5"):
        pax.Linear(3, 2.5)
