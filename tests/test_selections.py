"""One selection of `net.at(...)`, and one language of paths, wherever parts of a net are meant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_leaves, tree_structure

import pax_export as pax
from pax_export import sharding
from pax_export import transforms as T
from pax_export.core import named_leaves
from pax_export.errors import InvalidArgumentError
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.training import mark_trainable
from tests.closeness import assert_close
from tests.refusals import refused


class Gated(pax.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.norm = pax.Linear(dim, dim), pax.LayerNorm(dim, -1)
        self.inner = [pax.Linear(dim, dim)]

    def __call__(self, x):
        return x + self.inner[0](self.norm(x)) * jax.nn.sigmoid(self.gate(x))


class Net(pax.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.layers = [Gated(dim), Gated(dim)]
        self.norm, self.head = pax.LayerNorm(dim, -1), pax.Linear(dim, 2)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def net():
    return Net()


def names_in(tree):
    return {name for name, _ in named_leaves(tree)}


def leaves_of(net, what):
    """The names of the arrays in what a selection means."""
    inside = net.at(what).names()
    return {n for n in names_in(net) if any(f"{n}.".startswith(f"{i}.") or not i for i in inside)}


CHOICES = ["layers.*.norm", pax.LayerNorm, "**.gate", "head.weight", "layers.1"]


@pytest.mark.parametrize("what", CHOICES)
def test_gradients_axes_rules_exports_and_the_net_mean_the_same(net, what):
    expected, chosen = leaves_of(net, what), net.at(what)
    grads = T.grad(lambda net: jnp.sum(net(X)), wrt=chosen)(net)
    assert names_in(grads) == expected
    rows = sharding.table(net, sharding.abstract_mesh(data=2), {chosen: P("data")})
    assert {row.path for row in rows if any(row.spec)} == expected
    leaves = mark_trainable(make_exportable(net, None), chosen).leaves
    assert {leaf.name for leaf in leaves if leaf.trainable} == expected


@pytest.mark.parametrize("what", ["layers.*.norm", pax.LayerNorm, "**.gate", "layers.1"])
def test_exemptions_and_captures_take_selections_too(net, what):
    chosen = net.at(what)
    assert set(pax.debug.capture(net, chosen)(X)[1]) == set(chosen.names())
    assert set(pax.debug.capture(net, what)(X)[1]) == set(chosen.names())
    half = pax.precision.mixed_precision(net, jmp.get_policy("p=f32,c=f16,o=f16"), exempt=chosen)
    for module in half.at(chosen).values():
        assert pax.precision.policy_of(module).compute_dtype == jnp.float32
    assert pax.precision.policy_of(half.head).compute_dtype == jnp.float16


def test_a_path_means_the_same_in_rules_exports_captures_and_at(net):
    for path in ("layers.*", "layers.*.gate.weight", "*.bias", "**.norm", ".*", "layers.[!0]", ""):
        expected = leaves_of(net, path)
        rows = sharding.table(net, sharding.abstract_mesh(data=2), {path: P("data")})
        assert {row.path for row in rows if any(row.spec)} == expected, path
        leaves = mark_trainable(make_exportable(net, None), path).leaves
        assert {leaf.name for leaf in leaves if leaf.trainable} == expected, path


def test_a_path_in_a_filter_or_an_exemption_may_begin_anywhere(net):
    grads = T.grad(lambda net: jnp.sum(net(X)), wrt="norm.scale")(net)
    assert names_in(grads) == {"layers.0.norm.scale", "layers.1.norm.scale", "norm.scale"}
    grads = T.grad(lambda net: jnp.sum(net(X)), wrt=".norm.sc*")(net)
    assert names_in(grads) == {"norm.scale"}
    half = pax.precision.mixed_precision(net, jmp.get_policy("p=f32,c=f16,o=f16"), exempt=".norm")
    assert pax.precision.policy_of(half.norm).compute_dtype == jnp.float32
    assert pax.precision.policy_of(half.layers[0].norm).compute_dtype == jnp.float16


def test_functions_are_given_what_they_ask_for(net):
    seen = set(pax.debug.capture(net, lambda module: isinstance(module, pax.LayerNorm))(X)[1])
    assert seen == {"layers.0.norm", "layers.1.norm", "norm"}
    seen = set(pax.debug.capture(net, lambda path, module: path == "head")(X)[1])
    assert seen == {"head"}
    policy = jmp.get_policy("p=f32,c=f16,o=f16")
    half = pax.precision.mixed_precision(net, policy, exempt=lambda path, module: path == "head")
    assert pax.precision.policy_of(half.head).compute_dtype == jnp.float32
    with refused(TypeError, "exemption"):
        pax.precision.mixed_precision(net, policy, exempt=[T.PathContains("head")])


def test_a_selection_is_for_later_versions_of_a_net_and_for_its_training(net):
    head = net.at("head")
    frozen = (~head).freeze()
    step = T.grad(lambda net: jnp.sum(net(X) ** 2), wrt=T.All(T.Param, head))
    grads = step(frozen)
    new = frozen.map(lambda x: x * 1)
    assert_close(step(new).head.weight, grads.head.weight)
    assert names_in(grads) == {"head.weight", "head.bias"}
    with pytest.raises(InvalidArgumentError):
        T.grad(lambda net: net.weight.sum(), wrt=head)(pax.Linear(2, 2))


def test_stacked_modules_take_selections_as_axes(net):
    stacked = jax.tree_util.tree_map(lambda x: jnp.stack([x, x + 1]), net.layers[0])
    shared = stacked.at("gate").set(net.layers[0].gate)
    axes = T.StateAxes({shared.at("gate"): None, ...: 0})
    out = T.vmap(lambda layer, x: layer(x), in_axes=(axes, None))(shared, X)
    assert_close(out[0], net.layers[0](X))


def test_two_stars_cross_dots(net):
    rows = sharding.table(net, sharding.abstract_mesh(data=2), {"layers.**.*.weight": P("data")})
    assert sum(any(row.spec) for row in rows) == 4


def test_shapes_and_gradients_of_a_net_are_selected_in_as_the_net_is(net):
    shapes = jax.eval_shape(lambda: Net())
    assert shapes.at("*.weight").names() == net.at("*.weight").names()
    assert tree_structure(shapes.at("head").freeze()) == tree_structure(net.at("head").freeze())
    grads = jax.grad(lambda net: jnp.sum(net(X)))(net)
    clipped = grads.at("layers").map(lambda g: jnp.clip(g, -0.125, 0.125))
    assert float(max(abs(g).max() for g in tree_leaves(clipped.layers))) <= 0.125
    assert clipped.head == grads.head
