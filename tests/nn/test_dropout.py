import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused


def test_function():
    key, x = jax.random.PRNGKey(0), jnp.arange(1.0, 10_001.0)
    y = pax.dropout(key, 0.3, x)
    dropped = jax.random.bernoulli(key, 0.3, x.shape)
    assert_close(y, np.where(dropped, 0, x / 0.7), rtol=1e-6)
    assert abs(float((y == 0).mean()) - 0.3) < 0.02
    assert pax.dropout(key, 0, x) is x


def test_key_is_split_first_kept_second_used():
    layer, x = pax.Dropout(0.5), jnp.ones((3, 4))
    kept, used = jax.random.split(layer.rng_key)
    updated, y = layer % x
    assert (updated.rng_key == kept).all()
    assert (y == pax.dropout(used, 0.5, x)).all()


def test_each_call_drops_other_elements():
    layer, x = pax.Dropout(0.5), jnp.ones(64)
    layer, first = layer % x
    layer, second = layer % x
    assert not (first == second).all()


def test_returns_its_input_in_eval_mode_or_at_rate_0():
    x = jnp.ones(3)
    assert pax.Dropout(0.5).eval()(x) is x
    assert pax.Dropout(0.0)(x) is x


def test_key_is_drawn_from_the_stream_and_not_trained():
    layer = pax.Dropout(0.5)
    assert int(layer.rng_key[1]) == 686579304
    assert layer.pytree_attributes == ("rng_key",)
    assert jax.tree_util.tree_leaves(layer.parameters()) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_stays(dtype):
    assert pax.dropout(jax.random.key(0), 0.5, jnp.ones(3, dtype)).dtype == dtype


def test_repr():
    assert repr(pax.Dropout(0.25, name="drop")) == "(drop) Dropout(dropout_rate=0.25)"


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan")])
def test_rate_out_of_range(rate):
    with refused(AssertionError, where="Dropout.dropout_rate", got=repr(rate)):
        pax.Dropout(rate)
    with refused(AssertionError, "dropout.dropout_rate"):
        pax.dropout(jax.random.key(0), rate, jnp.ones(3))


def test_rate_must_be_known():
    with refused(TypeError, where="Dropout.dropout_rate", got="str: 'half'"):
        pax.Dropout("half")
    with pytest.raises(TypeError):
        jax.jit(lambda rate: pax.dropout(jax.random.key(0), rate, jnp.ones(3)))(0.5)
