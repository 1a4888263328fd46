"""Random keys under vmap: a single key is split and comes back as one; constructors draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.refusals import refused

KEYS = {"legacy": jax.random.PRNGKey, "typed": jax.random.key}
each_key = pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)


def data(key):
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def draw(stream, x):
    return stream, jax.random.normal(stream.next_rng_key()) + x


def distinct(array):
    return len(np.unique(np.asarray(array), axis=0))


@each_key
@pytest.mark.parametrize("options", [
    {},
    {"in_axes": (None, 0)},
    {"in_axes": (None, 0), "out_axes": (None, 0)},
    {"in_axes": (T.StateAxes({}), 0), "out_axes": 0},
    {"state_axes": {}},
    {"state_axes": {...: 0}},
], ids=str)  # fmt: skip
def test_a_key_that_is_split_comes_back_as_one_key_advanced(key, options):
    stream = pax.RngSeq(rng_key=key(0))
    mapped = T.vmap(draw, **options)
    after, drawn = mapped(stream, jnp.zeros(4))
    assert after._rng_key.shape == stream._rng_key.shape
    assert (data(after._rng_key) == data(jax.random.split(key(0))[0])).all()
    assert distinct(drawn) == 4
    # So it can go in again, any number of times, and always draws others.
    again, others = mapped(after, jnp.zeros(4))
    assert again._rng_key.shape == stream._rng_key.shape
    assert distinct(jnp.concatenate([drawn, others])) == 8


def test_the_other_leaves_of_its_module_are_stacked_as_they_were():
    class Noisy(pax.Module):
        def __init__(self):
            super().__init__()
            self.stream, self.total = pax.RngSeq(0), jnp.zeros(())

        def __call__(self, x):
            self.total = self.total + x
            return jax.random.normal(self.stream.next_rng_key())

    def call(net, x):
        return net(x), net

    _, net = T.vmap(call, in_axes=(None, 0))(Noisy(), jnp.arange(4.0))
    assert net.total.tolist() == [0, 1, 2, 3] and net.stream._rng_key.shape == (2,)


def test_a_module_that_is_open_gets_its_key_back_as_one():
    def draw_many(stream):
        return T.vmap(lambda stream, x: draw(stream, x)[1], in_axes=(None, 0))(stream, jnp.zeros(4))

    stream, drawn = pax.module_and_value(draw_many)(pax.RngSeq(0))
    assert stream._rng_key.shape == (2,) and distinct(drawn) == 4


def test_stacked_keys_stay_stacked():
    streams = T.Vmap(pax.RngSeq, axis_size=4)().vmap_module
    after, _ = T.vmap(draw)(streams, jnp.zeros(4))
    assert after._rng_key.shape == (4, 2) and distinct(after._rng_key) == 4


# --- constructors that draw from a stream that they are given -----------------------------


class Block(pax.Module):
    def __init__(self, width, stream, *, more=None):
        super().__init__()
        self.first = pax.Linear(width, width, rng_key=stream.next_rng_key())
        self.inner = Inner(width, stream if more is None else more["stream"])

    def __call__(self, x):
        return self.inner(self.first(x)), None


class Inner(pax.Module):
    """A constructor that a constructor calls."""

    def __init__(self, width, stream):
        super().__init__()
        self.linear = pax.Linear(width, width, rng_key=stream.next_rng_key())

    def __call__(self, x):
        return self.linear(x)


LIFTED = {
    "Vmap": lambda ctor: T.Vmap(ctor, axis_size=3),
    "Scan": lambda ctor: T.Scan(ctor, length=3),
}


@pytest.mark.parametrize("lifted", LIFTED)
@each_key
def test_a_constructor_draws_from_the_stream_that_it_is_given(lifted, key):
    stream = pax.RngSeq(rng_key=key(0))
    net = LIFTED[lifted](Block)(4, stream)
    layers = T.unstack_layers(net._inner)
    each = jax.random.split(jax.random.split(key(0))[1], 3)
    for layer, own in zip(layers, each, strict=True):
        one = T.Remat(Block)(4, pax.RngSeq(rng_key=own)).remat_module
        assert_close(layer.first.weight, one.first.weight, rtol=1e-6)
        assert_close(layer.inner.linear.weight, one.inner.linear.weight, rtol=1e-6)
    weights = [w for layer in layers for w in (layer.first.weight, layer.inner.linear.weight)]
    assert distinct(jnp.stack(weights)) == 6
    assert (data(stream._rng_key) == data(key(0))).all()  # the caller's stays


def test_the_stream_in_a_tree_and_by_keyword():
    net = T.Vmap(Block, axis_size=3)(4, pax.RngSeq(0), more={"stream": pax.RngSeq(1)})
    alike = T.Vmap(Block, axis_size=3)(4, pax.RngSeq(0))
    assert (net.vmap_module.first.weight == alike.vmap_module.first.weight).all()
    assert (net.vmap_module.inner.linear.weight != alike.vmap_module.inner.linear.weight).all()


def test_lifted_constructors_in_one_another():
    net = T.Vmap(T.Scan(T.Remat(Block), length=2), axis_size=3)(4, pax.RngSeq(0))
    weight = net.vmap_module.scan_module.remat_module.inner.linear.weight
    assert weight.shape == (3, 2, 4, 4) and distinct(weight.reshape(6, -1)) == 6


def test_a_constructor_that_is_a_function():
    def make(stream):
        return pax.Linear(2, 3, rng_key=stream.next_rng_key())

    assert distinct(T.Vmap(make, axis_size=3)(pax.RngSeq(0)).vmap_module.weight) == 3


def test_vmap_of_a_class():
    net = T.vmap(Inner, in_axes=None, axis_size=3)(4, pax.RngSeq(0))
    assert distinct(net.linear.weight) == 3


@pytest.mark.parametrize("make", [
    lambda stream: T.Vmap(Block, axis_size=3)(4, stream),
    lambda stream: T.Scan(Block, length=3)(4, stream),
    lambda stream: T.Remat(Block)(4, stream),
], ids=["Vmap", "Scan", "Remat"])  # fmt: skip
def test_a_stream_that_is_open_is_advanced(make):
    def two(stream):
        return make(stream), make(stream)

    stream, (one, other) = pax.module_and_value(two)(pax.RngSeq(0))
    assert stream._rng_key.shape == (2,)
    assert (stream._rng_key != pax.RngSeq(0)._rng_key).any()
    assert (one._inner.first.weight != other._inner.first.weight).all()


def test_a_stream_that_stays_is_one_for_each():
    class Keeper(pax.Module):
        def __init__(self, stream):
            super().__init__()
            self.stream = stream

        def __call__(self):
            return jax.random.normal(self.stream.next_rng_key())

    net = T.Vmap(Keeper, axis_size=3)(pax.RngSeq(0))
    assert net.vmap_module.stream._rng_key.shape == (3, 2)
    assert distinct(pax.purecall(net)[1]) == 3


def test_equal_layers_without_split_keys():
    net = T.Vmap(Inner, axis_size=3, split_rngs=None)(4, pax.RngSeq(0))
    assert distinct(net.vmap_module.linear.weight) == 1


def test_another_module_that_a_constructor_is_given():
    class Keeps(pax.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

    norm = pax.BatchNorm1D(5)
    net = T.Vmap(Keeps, axis_size=3)(norm)
    assert net.vmap_module.norm.scale.shape == (3, 1, 1, 5)


def test_elsewhere_constructors_change_nothing_but_their_object():
    with refused(ValueError, where="RngSeq._rng_key"):
        Inner(4, pax.RngSeq(0))
    with refused(ValueError, where="RngSeq._rng_key"):
        pax.pure(lambda stream: Inner(4, stream))(pax.RngSeq(0))

    def make(stream):
        net = T.Remat(Inner)(4, stream)
        Inner(4, stream)  # what was lent has been given back
        return net

    with refused(ValueError, where="RngSeq._rng_key"):
        pax.pure(make)(pax.RngSeq(0))
