"""Linear and Embed."""

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


# --- embed ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_numbers_of_embed(dtype):
    layer = pax.Embed(5, 3)
    ids = np.array([[0, 4, 2], [1, 1, 3]], dtype)
    assert (layer(ids) == np.asarray(layer.weight)[ids]).all()
    assert layer(2).shape == (3,)


def test_narrow_integers_of_a_large_table():
    layer = pax.Embed(50257, 2)
    for lookup in (layer, jax.jit(layer), pax.quantize(layer)[0]):
        for dtype in ("int8", "int16", "uint8", "uint16"):
            ids = jnp.array([3, -1 if dtype.startswith("i") else 4], dtype)
            assert (lookup(ids) == lookup(ids.astype("int32"))).all(), dtype


def test_integers_outside_of_the_table():
    layer = pax.Embed(5, 3)
    ids = jnp.array([-1, 5, 99, -6])
    for lookup in (layer, jax.jit(layer)):
        assert (lookup(ids) == layer.weight[jnp.array([4, 4, 4, 0])]).all()


def test_initial_values_come_from_the_key_itself():
    key = jax.random.PRNGKey(7)
    layer = pax.Embed(30, 20, rng_key=key)
    expected = jax.random.normal(key, (30, 20)) * 0.01
    assert_close(layer.weight, expected, rtol=1e-6)
    assert (pax.Embed(2, 3, lambda key, shape: jnp.ones(shape)).weight == 1).all()


def test_gradient_counts_uses():
    gradient = jax.grad(lambda layer: layer(jnp.array([1, 1, 2])).sum())(pax.Embed(4, 1))
    assert (gradient.weight[:, 0] == jnp.array([0, 2, 1, 0])).all()


def test_repr_of_embed():
    assert repr(pax.Embed(7, 3)) == "Embed(vocab_size=7, embed_dim=3)"


@pytest.mark.parametrize("ids", [jnp.ones((2, 3)), jnp.ones((2, 3), bool)], ids=["float", "bool"])
def test_only_integers(ids):
    with refused(TypeError, where="Embed(vocab_size=5, embed_dim=3)", got=f"{ids.dtype}[2, 3]"):
        pax.Embed(5, 3)(ids)


def test_sizes():
    with refused(AssertionError, "Embed.vocab_size"):
        pax.Embed(0, 3)
    with refused(TypeError, "Embed.embed_dim"):
        pax.Embed(3, "x")
