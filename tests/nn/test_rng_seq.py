import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.refusals import refused


def test_state():
    assert pax.RngSeq(seed=42)._rng_key.tolist() == [0, 42]
    assert int(pax.RngSeq()._rng_key[1]) == 686579304  # the first of the ambient stream
    key = jax.random.PRNGKey(3)
    assert (pax.RngSeq(seed=42, rng_key=key)._rng_key == key).all()
    assert int(pax.next_rng_key()[1]) == 119540832  # seeds and keys draw none
    assert pax.RngSeq().pytree_attributes == ("_rng_key",)
    assert jax.tree_util.tree_leaves(pax.RngSeq().parameters()) == []


@pytest.mark.parametrize("count", [0, 2, 3])
def test_several_keys_are_a_list(count):
    stream = pax.RngSeq(seed=1)
    updated, keys = pax.module_and_value(stream.next_rng_key)(count)
    expected = jax.random.split(stream._rng_key, count + 1)
    assert isinstance(keys, list) and len(keys) == count
    assert (updated._rng_key == expected[0]).all()
    assert all((key == other).all() for key, other in zip(keys, expected[1:]))


@pytest.mark.parametrize("mode", [True, False])
def test_one_key_is_the_key_itself_in_either_mode(mode):
    stream = pax.RngSeq(seed=1).train() if mode else pax.RngSeq(seed=1).eval()
    updated, key = pax.module_and_value(stream.next_rng_key)()
    assert (key == jax.random.split(stream._rng_key, 2)[1]).all()
    assert not (updated._rng_key == stream._rng_key).any()
    with refused(ValueError, "immutable"):
        stream.next_rng_key()


def test_typed_keys():
    stream = pax.RngSeq(rng_key=jax.random.key(0))
    updated, keys = pax.module_and_value(stream.next_rng_key)(2)
    assert jnp.issubdtype(keys[0].dtype, jax.dtypes.prng_key)
    assert updated._rng_key.dtype == stream._rng_key.dtype


def test_repr_counts_the_key():
    assert repr(pax.RngSeq(seed=1)) == "RngSeq(state=2, mode=train)"


def test_what_makes_no_sense():
    with refused(ValueError, where="RngSeq.rng_key", got="int: 42"):
        pax.RngSeq(rng_key=42)
    with refused(TypeError, where="RngSeq.seed", got="str: 'a'"):
        pax.RngSeq(seed="a")
    with refused(AssertionError, "num_keys"):
        pax.module_and_value(pax.RngSeq().next_rng_key)(-1)
