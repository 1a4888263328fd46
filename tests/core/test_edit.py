"""replace and its sisters, map, apply."""

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.core import named_leaves
from tests.core.models import Counter, Dense, Net


def test_replace():
    layer = Dense()
    other = layer.replace(bias=jnp.ones(3), _name="x")
    assert other.bias.sum() == 3 and other.name == "x" and layer.name is None
    assert layer.replace(bias=None).pytree_attributes == ("weight",)
    assert layer.replace(din=jnp.ones(1)).pytree_attributes == ("din", "weight", "bias")


def test_replace_refuses():
    with pytest.raises(AssertionError, match="where: Dense.biass"):
        Dense().replace(biass=1)
    with pytest.raises(AttributeError, match="read-only"):
        Dense().replace(name="x")
    with pytest.raises(ValueError, match="bias and weight|weight and bias"):
        layer = Dense()
        layer.replace(bias=layer.weight)


def test_set_attribute():
    layer = Dense().set_attribute("extra", Dense())
    assert layer.pytree_attributes == ("weight", "bias", "extra")
    with pytest.raises(ValueError, match="One array stands at two places"):
        layer.set_attribute("more", layer.weight)
    layer = Dense().set_attribute("log", [])
    layer.log.append(1)
    assert layer.log == [1]


def test_replace_node():
    net = Net()
    new = net.replace_node(net.layers[1], Dense(5, 5))
    assert new.layers[1].din == 5 and net.layers[1].din == 2
    new = net.replace_node(net.parts["a"].bias, None)
    assert new.parts["a"].bias is None
    assert new.parts["a"].pytree_attributes == ("weight", "bias")
    assert net.replace_node(net.layers, [1.0]).layers == [1.0]
    assert net.replace_node(net, 3) == 3
    assert net.replace_node(net.mixed[0], Dense(7, 7)).mixed[0].din == 7
    with pytest.raises(ValueError, match="0 occurrences of list"):
        net.replace_node(net.mixed, [1])
    with pytest.raises(ValueError, match="where: layers.0.weight and layers.1.weight"):
        net.replace_node(net.layers[0], net.layers[1])


def shout(self, x):
    return x + 100


def test_replace_method():
    layer = Dense().replace_method(__call__=shout)
    assert layer(1) == 101 and isinstance(layer, Dense)
    assert type(layer).__name__ == "Dense"
    assert type(layer) is type(Dense().replace_method(__call__=shout))
    both = layer.replace_method(twice=lambda self: self(1) * 2)
    assert both.twice() == 202


def test_map():
    net = Net()
    total = net.map(lambda a, b: a + b, net.eval())
    assert total.layers[0].weight[0, 0] == 1.0 and total.training
    assert total.options == net.options
    params = net.parameters().map(lambda x: x * 0)
    assert params.scale == pax.EmptyNode() and params.layers[0].weight.sum() == 0
    with pytest.raises(ValueError):
        net.map(lambda a, b: a, Dense())
    with pytest.raises(ValueError, match="one leaf for each leaf"):
        net.map(lambda a, b: (a, b), net.eval())


def test_map_keeps_leaves_in_their_places():
    net = Net()
    names = dict(named_leaves(net))
    mapped = net.map(lambda a, b: b, net.eval().map(lambda x: x + 1))
    for name, leaf in named_leaves(mapped):
        assert (leaf == names[name] + 1).all(), name


def test_apply_runs_children_first():
    seen = []

    def record(module):
        seen.append(type(module).__name__)
        return module

    assert Net().apply(record).kind == "net"
    assert seen == ["Dense", "Dense", "Dense", "Counter", "Dense", "Net"]
    del seen[:]
    Net().apply_submodules(record)
    assert seen == ["Dense", "Dense", "Dense", "Counter", "Dense"]


def test_apply_may_replace_modules_and_the_root():
    net = Net()
    new = net.apply(lambda m: Counter() if isinstance(m, Dense) else m)
    assert all(isinstance(m, Counter) for m in new.submodules())
    assert net.apply(lambda m: 5 if isinstance(m, Net) else m) == 5


def test_apply_gives_immutable_modules():
    def change(module):
        module.din = 1
        return module

    with pytest.raises(ValueError, match="immutable"):
        Dense().apply(change)


def chain(depth):
    net = pax.Module()
    for _ in range(depth):
        net = pax.Module().set_attribute("child", net)
    return net


@pytest.mark.parametrize("width", [25, 100])
def test_calls_grow_linearly_with_the_number_of_modules(width):
    """Counts visits, not seconds: PAX's eval and parameters were quadratic."""
    net = pax.Module().set_attribute("layers", [Dense() for _ in range(width)])
    visits = []
    net.apply(lambda m: visits.append(1) or m)
    assert len(visits) == width + 1
    assert len(jax.tree_util.tree_leaves(net.eval().train().parameters())) == 2 * width


def test_deep_trees():
    net = chain(60)
    assert net.eval().train() == net


def test_a_tree_may_be_as_deep_as_jax_can_flatten():
    """jax takes 1000 levels, and a Sequential in a Sequential is two."""
    net = pax.Linear(1, 1)
    for _ in range(400):
        net = pax.Sequential(net)
    assert len(jax.tree_util.tree_leaves(net.eval().parameters())) == 2
    assert jax.tree_util.tree_leaves(pax.freeze_parameters(net).parameters()) == []
    assert net.apply(lambda module: module) == net
    assert pax.pure(lambda module: module)(net) == net
