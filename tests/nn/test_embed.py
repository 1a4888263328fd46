import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_numbers(dtype):
    layer = pax.Embed(5, 3)
    ids = np.array([[0, 4, 2], [1, 1, 3]], dtype)
    assert (layer(ids) == np.asarray(layer.weight)[ids]).all()
    assert layer(2).shape == (3,)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16"])
def test_narrow_integers_of_a_large_table(dtype):
    layer = pax.Embed(50257, 2)
    ids = jnp.array([3, -1 if dtype.startswith("i") else 4], dtype)
    for lookup in (layer, jax.jit(layer), pax.quantize(layer)[0]):
        assert (lookup(ids) == lookup(ids.astype("int32"))).all()


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


def test_repr():
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
