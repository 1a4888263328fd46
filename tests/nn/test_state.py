"""EMA and RngSeq."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.core.models import Free
from tests.nn.reference import drawn
from tests.refusals import refused


def test_numbers():
    ema, average = pax.EMA(jnp.ones(3), 0.75), np.ones(3)
    for step in range(4):
        x = drawn(3, seed=step)
        average = 0.75 * average + 0.25 * x
        ema, y = ema % x
        assert_close(y, average, rtol=1e-5)
        assert y is ema.averages
    assert ema.debias is None


def test_debias_forgets_the_initial_value():
    ema = pax.EMA(jnp.full(3, 100.0), 0.9, debias=True)
    assert ema.debias.dtype == jnp.float32 and float(ema.debias) == 0
    ema, y = ema % drawn(3)
    assert_close(y, drawn(3), rtol=1e-6)
    assert float(ema.debias) == 1
    ema, y = ema % jnp.zeros(3)
    assert_close(y, 0.9 * drawn(3), rtol=1e-6)


def test_eval_mode_returns_the_averages():
    ema = pax.EMA({"a": jnp.ones(2)}, 0.9).eval()
    assert ema({"a": jnp.zeros(2)}) is ema.averages
    assert ema("anything") is ema.averages


def test_any_pytree():
    ema = pax.EMA({"a": [1.0, np.ones(2)], "b": (jnp.zeros(()),)}, 0.5)
    ema, y = ema % {"a": [3.0, np.zeros(2)], "b": (jnp.ones(()),)}
    expected = {"a": [2.0, np.full(2, 0.5)], "b": (0.5,)}
    assert jax.tree_util.tree_structure(y) == jax.tree_util.tree_structure(expected)
    jax.tree_util.tree_map(assert_close, y, expected)


def test_averages_of_a_module_are_not_trained():
    net = pax.Linear(2, 3)
    model = Free(net=net, ema=pax.EMA(net, 0.9))  # copies: no array stands at two places
    parameters = model.parameters()
    assert len(jax.tree_util.tree_leaves(parameters)) == 2
    assert jax.tree_util.tree_leaves(parameters.ema) == []
    assert parameters | model == model
    assert isinstance(model.ema, pax.StateModule)
    _, average = model.ema % model.net.map(jnp.zeros_like)
    assert_close(average.weight, model.net.weight * 0.9, rtol=1e-6)
    assert average(jnp.ones((1, 2))).shape == (1, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_averages_are_in_float32_at_least(dtype):
    ema = pax.EMA(jnp.ones(3, dtype), 0.9, debias=True)
    for new in (jnp.ones(3, "float16"), jnp.ones(3, "float32")):
        ema, y = ema % new
        assert y.dtype == "float32"
    assert not pax.EMA(1.0, 0.9).averages.weak_type


def test_averages_of_half_precision_do_not_stick():
    ema = pax.EMA(jnp.bfloat16(0.0), 0.999)
    ema = jax.lax.scan(lambda e, _: ((e % jnp.bfloat16(1.0))[0], None), ema, None, 3000)[0]
    assert_close(ema.averages, 1 - 0.999**3000, rtol=1e-3)


def test_integers_are_replaced_if_allowed():
    ema = pax.EMA({"n": jnp.array(1), "x": jnp.array(0.0)}, 0.5, allow_int=True)
    ema, y = ema % {"n": jnp.array(7), "x": jnp.array(1.0)}
    assert int(y["n"]) == 7 and y["n"].dtype == jnp.int32
    assert float(y["x"]) == 0.5


def test_keys_are_replaced_if_allowed():
    net = pax.Sequential(pax.Linear(2, 2), pax.Dropout(0.5))
    _, y = pax.EMA(net, 0.9, allow_int=True) % net
    assert (y[1].rng_key == net[1].rng_key).all()
    typed = pax.EMA(jax.random.key(0), 0.9, allow_int=True)
    assert (typed % jax.random.key(1))[1] == jax.random.key(1)


def test_integers_are_refused():
    expected = {"where": "EMA['n']", "got": "int32"}
    with refused(ValueError, **expected):
        pax.EMA({"n": jnp.array(1)}, 0.5)
    with refused(ValueError, **expected):
        pax.EMA({"n": jnp.array(1.0)}, 0.5) % {"n": jnp.array(1)}
    with refused(ValueError, "bool"):
        pax.EMA(True, 0.5)


def test_another_structure():
    with refused(ValueError, "against"):
        pax.EMA({"a": jnp.ones(2)}, 0.5) % jnp.ones(2)


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_rate_out_of_range(rate):
    with refused(AssertionError, "EMA.decay_rate", "0 <= decay_rate <= 1"):
        pax.EMA(jnp.ones(2), rate)


def test_repr_counts_the_averages():
    assert repr(pax.EMA(jnp.ones(2), 0.5)) == "EMA(state=2, mode=train)"


# --- rng seq -------------------------------------------------------------------------


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
