"""T.remat(layer) and T.vmap(layer) are layers: trained, saved, with state."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close


class Net(pax.Module):
    def __init__(self, wrap):
        super().__init__()
        self.block = wrap(pax.Sequential(pax.Linear(4, 4), pax.Dropout(0.5), pax.BatchNorm1D(4)))
        self.head = pax.Linear(4, 1)

    def __call__(self, x):
        return self.head(self.block(x))


x = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")


def trained(net):
    def loss_fn(net, x):
        net, y = net % x
        loss = (y**2).mean()
        return loss, (loss, net)

    update = jax.jit(pax.build_update_fn(loss_fn))
    optimizer = pax.optim.from_optax(optax.adam(0.1))(net.parameters())
    for _ in range(3):
        net, optimizer, _ = update(net, optimizer, x)
    assert update._cache_size() == 1
    return net


def test_a_rematerialized_layer_trains_as_the_layer_does():
    plain = Net(lambda layer: layer)
    net = Net(T.remat)
    net = net.replace(block=T.remat(plain.block.copy()), head=plain.head.copy())
    assert len(jax.tree.leaves(net.parameters())) == len(jax.tree.leaves(plain.parameters()))
    assert "block.layer.modules.0.weight" in net.at("**.weight").names()
    a, b = trained(plain), trained(net)
    assert_close(b.head.weight, a.head.weight)
    assert_close(b.eval()(x), a.eval()(x))


def test_copies_pickles_weights_and_summaries_have_the_layer():
    net = Net(T.remat).eval()
    assert "layer: Sequential" in net.summary()
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert jax.tree.structure(same) == jax.tree.structure(net)
        assert_close(same(x), net(x))
    assert_close(net.load_state_dict(net.state_dict())(x), net(x))


@pytest.mark.parametrize(("in_axes", "shape"), [(0, (5, 2, 4)), (1, (2, 5, 4)), ((0,), (5, 2, 4))])
def test_a_mapped_layer(in_axes, shape):
    layer = T.vmap(pax.Linear(4, 3), in_axes=in_axes)
    images = np.ones(shape, "float32")
    assert layer(images).shape == (5, 2, 3)
    gradient = pax.grad(lambda layer: layer(images).sum())(layer)
    assert_close(gradient.layer.weight, jnp.full((4, 3), 10.0))


def test_static_arguments_count_those_of_the_layer():
    class Power(pax.Module):
        def __call__(self, x, exponent):
            assert isinstance(exponent, int)
            return x**exponent

    assert_close(T.remat(Power(), static_argnums=1)(jnp.full(2, 3.0), 2), jnp.full(2, 9.0))
