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
