"""Deep networks by Scan(Remat(Layer)): program size, export, names of weights; an ensemble."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import tree_leaves

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.transforms.models import assert_trees_close, at, batch

DIM = 4


class Layer(pax.Module):
    """One layer of a Transformer."""

    def __init__(self):
        super().__init__()
        self.attention = pax.MultiHeadAttention(2, DIM // 2, 1.0)
        self.norm1 = pax.LayerNorm(DIM, -1, True, True)
        self.norm2 = pax.LayerNorm(DIM, -1, True, True)
        self.fc1, self.fc2 = pax.Linear(DIM, DIM), pax.Linear(DIM, DIM)
        self.dropout = pax.Dropout(0.1)

    def __call__(self, h):
        n = self.norm1(h)
        h = h + self.dropout(self.attention(n, n, n))
        return h + self.fc2(jax.nn.gelu(self.fc1(self.norm2(h)))), None


class Scanned(pax.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = T.Scan(T.Remat(Layer), length=layers)()

    def __call__(self, h):
        return self.layers(h)[0]


class Listed(pax.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = [Layer() for _ in range(layers)]

    def __call__(self, h):
        for layer in self.layers:
            h, _ = layer(h)
        return h


def loss_fn(net, h):
    net, y = net % h
    return jnp.sum(y**2), net


def operations(build):
    """How many operations the program of a training gradient has."""
    net = jax.eval_shape(build)
    spec = jax.ShapeDtypeStruct((1, 3, DIM), jnp.float32)
    lowered = jax.jit(T.grad(loss_fn, has_aux=True)).lower(net, spec)
    return sum(" = " in line for line in lowered.as_text().splitlines())


def test_forty_eight_layers_are_a_program_as_large_as_twelve():
    assert operations(lambda: Scanned(48)) == operations(lambda: Scanned(12))
    two, four = operations(lambda: Listed(2)), operations(lambda: Listed(4))
    assert four > 1.5 * two  # what a Python loop does
    assert operations(lambda: Scanned(48)) < four


def test_one_form_loads_in_the_other(tmp_path):
    pytest.importorskip("safetensors")
    scanned, listed = Scanned(3), Listed(3)
    pax.save_weights(listed, tmp_path / "listed.safetensors")
    names = [name for name, _ in pax.core.named_leaves(listed)]
    assert "layers.2.fc1.weight" in names  # the name says which layer

    loaded = pax.load_weights(Listed(3), tmp_path / "listed.safetensors")
    stack = scanned.layers.scan_module.remat_module
    filled = scanned.replace_node(stack, T.stack_layers(loaded.layers))
    pax.assert_structure_equal(filled, scanned)
    h = batch(2, 3, DIM)
    assert_trees_close((filled % h)[1], (listed % h)[1])

    back = T.unstack_layers(filled.layers.scan_module.remat_module)
    assert_trees_close(listed.replace(layers=back), listed, 0)


def test_the_deep_transformer_as_saved_model(tmp_path):
    tf = pytest.importorskip("tensorflow")
    net = Scanned(48).eval()
    pax.export.to_saved_model(
        net, tmp_path / "deep", pax.export.spec(f"batch, length, {DIM}"), validate=False
    )
    served = pax.export.load(tmp_path / "deep")
    for shape in ((1, 2), (3, 5)):
        h = batch(*shape, DIM)
        assert_close(served(np.asarray(h)), net(h), rtol=2e-4, atol=2e-4)
    leaves = tf.saved_model.load(str(tmp_path / "deep")).leaves
    assert leaves["layers.scan_module.remat_module.fc1.weight"].shape == (48, DIM, DIM)


class Classifier(pax.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm = pax.Linear(8, 4), pax.BatchNorm1D(4)
        self.dropout, self.logits = pax.Dropout(0.1), pax.Linear(4, 3)

    def __call__(self, x):
        h = self.norm(self.hidden(x)[None])[0]
        return self.logits(self.dropout(jax.nn.relu(h)))


def cross_entropy(net, x, y):
    logits = net(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), net


def test_an_ensemble_trains_as_its_members_do_alone():
    """One jitted step for eight is eight steps, each net with its own keys and statistics."""
    traces = []

    def ensemble_loss(nets, x, y):
        traces.append(x)
        losses, nets = T.vmap(cross_entropy, in_axes=(0, None, None))(nets, x, y)
        return losses.sum(), (losses, nets)

    def loss_alone(net, x, y):
        loss, net = pax.pure(cross_entropy)(net, x, y)
        return loss, (loss, net)

    sgd = pax.optim.from_optax(optax.sgd(0.1, momentum=0.9))
    nets = T.vmap(Classifier, axis_size=8)()
    alone = [at(nets, i) for i in range(8)]
    steps = T.jit(pax.build_update_fn(ensemble_loss)), jax.jit(pax.build_update_fn(loss_alone))
    optimizer = sgd(nets.parameters())
    optimizers = [sgd(net.parameters()) for net in alone]
    for seed in range(3):
        x, y = batch(16, 8, seed=seed), jnp.arange(16) % 3
        nets, optimizer, losses = steps[0](nets, optimizer, x, y)
        for i in range(8):
            alone[i], optimizers[i], loss = steps[1](alone[i], optimizers[i], x, y)
            assert_close(losses[i], loss, rtol=1e-4)
    assert len(traces) == 1
    for i in range(8):
        assert_trees_close(at(nets, i), alone[i], 1e-4)
    weights = tree_leaves(nets)[0]
    assert len(np.unique(np.asarray(weights), axis=0)) == 8


def test_a_scan_over_a_symbolic_axis_is_exported():
    def summed(layer, xs):
        step = T.scan(
            lambda carry, layer, x: (carry + layer(x[None])[0], carry), in_axes=(None, None, 0)
        )
        return step(jnp.zeros(2), layer, xs)

    layer = pax.Linear(3, 2)
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 3"), jnp.float32)
    exported = jax.export.export(jax.jit(lambda xs: summed(layer, xs)))(spec)
    for length in (1, 5):
        xs = jax.random.normal(jax.random.key(0), (length, 3))
        for found, expected in zip(exported.call(xs), summed(layer, xs)):
            assert_close(found, expected, atol=1e-6)
