"""replace and its sisters, map, apply."""

import functools
import gc
import inspect
import pickle

import jax
import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export.core import named_leaves
from pax_export.errors import InvalidArgumentError
from tests.core.models import Counter, Dense, Free, Net
from tests.refusals import refused


def test_replace():
    layer = Dense()
    other = layer.replace(bias=jnp.ones(3), _name="x")
    assert other.bias.sum() == 3 and other.name == "x" and layer.name is None
    assert layer.replace(bias=None).pytree_attributes == ("weight",)
    assert layer.replace(din=jnp.ones(1)).pytree_attributes == ("din", "weight", "bias")


def test_replace_refuses():
    with refused(AssertionError, where="Dense.biass"):
        Dense().replace(biass=1)
    with refused(AttributeError, "'name'"):
        Dense().replace(name="x")
    with refused(ValueError, where="weight and bias"):
        layer = Dense()
        layer.replace(bias=layer.weight)


def test_set_attribute():
    layer = Dense().set_attribute("extra", Dense())
    assert layer.pytree_attributes == ("weight", "bias", "extra")
    with refused(ValueError, where="weight and more"):
        layer.set_attribute("more", layer.weight)


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
    layer, part = Dense(7, 7), [1.0]
    assert net.replace_node(net.layers[0], layer).layers[0] is layer
    assert net.replace_node(net.layers, part).layers == part
    assert net.replace_node(net.mixed, [1]).mixed == [1]
    with refused(ValueError, where="Net", got="0 occurrences of list"):
        net.replace_node([1], [1])
    with refused(ValueError, where="layers.0.weight and layers.1.weight"):
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
    total = net.map(lambda a, b: a + b, net.eval().map(lambda x: x + 1))
    for (name, leaf), old in zip(named_leaves(total), jax.tree.leaves(net)):
        assert (leaf == 2 * old + 1).all(), name
    assert total.training and total.options == net.options
    params = net.parameters().map(lambda x: x * 0)
    assert params.scale == pax.EmptyNode() and params.layers[0].weight.sum() == 0
    with pytest.raises(ValueError):
        net.map(lambda a, b: a, Dense())
    with refused(ValueError, where="Net"):
        net.map(lambda a, b: (a, b), net.eval())


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
    with refused(ValueError, where="Dense.din"):
        Dense().apply(lambda m: setattr(m, "din", 1))


def test_apply_visits_each_module_once():
    """PAX's eval and parameters were quadratic."""
    net = pax.Module().set_attribute("layers", [Dense() for _ in range(100)])
    visits = []
    net.apply(lambda m: visits.append(1) or m)
    assert len(visits) == 101
    assert len(jax.tree.leaves(net.eval().train().parameters())) == 200


def test_a_tree_may_be_as_deep_as_jax_can_flatten():
    """jax takes 1000 levels, and a Sequential in a Sequential is two."""
    net = pax.Linear(1, 1)
    for _ in range(400):
        net = pax.Sequential(net)
    assert len(jax.tree_util.tree_leaves(net.eval().parameters())) == 2
    assert jax.tree_util.tree_leaves(pax.freeze_parameters(net).parameters()) == []
    assert net.apply(lambda module: module) == net
    assert pax.pure(lambda module: module)(net) == net


def test_misspelt_names_are_answered_with_near_ones():
    for name, write in {
        "weigth": "module.replace(weight=...), or module.set_attribute('weigth', value) to add one",
        "zzz": "module.set_attribute('zzz', value) to add one",
    }.items():
        with refused(InvalidArgumentError, write=write):
            Dense().replace(**{name: 1})


def test_a_node_beside_static_leaves_is_replaced_and_nothing_stays_wrapped():
    inner = {"k": (jnp.ones(2), [3, jnp.zeros(1)])}
    net = Free(items=[Dense(1, 1), 5, jnp.tanh], inner=inner)
    new = net.replace_node(net.items[0], 3)
    assert new.items == [3, 5, jnp.tanh] and new.inner["k"][1][0] == 3
    assert new.pytree_attributes == ("inner",)
    new = net.replace_node(net.items[0], None)
    assert new.items == [None, 5, jnp.tanh]
    new = net.replace_node(net.inner["k"][0], "text")
    assert new.inner["k"][0] == "text" and new.inner["k"][1][0] == 3
    assert new.pytree_attributes == ("items", "inner")
    new = pax.Module().set_attribute("net", net)
    new = new.replace_node(new.net.items[0], 3)
    assert new.net.items == [3, 5, jnp.tanh]
    mask = jax.tree_util.tree_map(lambda x: True, net)
    other = mask.replace_node(mask.items[0], mask.items[0].replace(din=9))
    assert len(jax.tree_util.tree_leaves(other)) == len(jax.tree_util.tree_leaves(mask))


def test_methods_that_close_over_something_make_one_class():
    def scaled(n):
        def __call__(self, x, *, offset=0):
            return n * (x @ self.weight) + offset

        return __call__

    def classes():
        gc.collect()
        return len(
            [c for c in gc.get_objects() if issubclass(type(c), type) and issubclass(c, Dense)]
        )

    layer = Dense()
    one = layer.replace_method(__call__=scaled(1))
    before = classes()
    kinds = {type(layer.replace_method(__call__=scaled(n))) for n in range(50)}
    kinds |= {type(layer.replace_method(__call__=lambda self, x, n=n: n * x)) for n in range(50)}
    for n in range(50):
        part = layer.replace_method(also=functools.partial(max, n), __call__=scaled(n))
        assert (part.also(3), part(jnp.ones(2)).tolist()) == (max(3, n), [n, n, n])
    assert kinds == {type(one)} and classes() <= before + 1
    x = jnp.ones(2)
    two = layer.replace_method(__call__=scaled(2))
    assert (two(x).tolist(), one(x).tolist()) == ([2, 2, 2], [1, 1, 1])
    assert (two % x)[1].tolist() == pax.pure(two)(x).tolist() == [2, 2, 2]
    assert type(two).__call__(two, x, offset=1).tolist() == [3, 3, 3]
    assert str(inspect.signature(two.__call__)) == "(x, *, offset=0)"
    structure = jax.tree_util.tree_structure
    assert structure(two) == structure(layer.replace_method(__call__=two.__call__.__func__))
    assert structure(two) != structure(one)
    assert jax.jit(lambda m, x: m(x))(two, x).tolist() == [2, 2, 2]
    half = pax.apply_mp_policy(two, jmp.get_policy("p=f32,c=f16,o=f32"))
    assert half(x).tolist() == [2, 2, 2] and half.eval()(x).dtype == jnp.float32
    back = two.replace_method(__call__=shout)
    assert back(1) == 101 and type(back) is type(layer.replace_method(__call__=shout))
    assert pax.freeze_parameters(two)(x).tolist() == [2, 2, 2]
    both = two.replace_method(twice=scaled(4))
    assert both.twice(x).tolist() == [4, 4, 4] and both(x).tolist() == [2, 2, 2]


def test_ten_thousand_replaced_methods_keep_nothing():
    layer = Dense()

    def scaled(n):
        return lambda self, x: n * x

    def wrapped(n):
        @functools.wraps(shout)
        def method(self, x, times=n):
            return shout(self, x) * times

        return method

    made = {
        "closure": lambda n: {"__call__": scaled(n)},
        "default": lambda n: {"__call__": lambda self, x, n=n: n},
        "partial": lambda n: {"also": functools.partial(max, n)},
        "wrapped": lambda n: {"__call__": wrapped(n)},
        "two": lambda n: {"__call__": scaled(n), "twice": scaled(2 * n)},
        "nothing closed over": lambda n: {"__call__": lambda self, x: x},
    }

    def rounds(count):
        kinds = set()
        for make in made.values():
            kinds |= {type(layer.replace_method(**make(n))) for n in range(count)}
        return kinds

    kinds = rounds(10)
    gc.collect()
    before = len(gc.get_objects())
    assert rounds(10_000 // len(made)) == kinds
    assert len(kinds) == 4  # which methods the modules hold, and the one that needs no holding
    gc.collect()
    assert len(gc.get_objects()) - before < 1000


def test_replaced_methods_are_pickled_by_name():
    layer = Dense().replace_method(add=functools.partial(max, 3), __call__=shout)
    again = pickle.loads(pickle.dumps(layer))
    assert again.add(1) == 3 and again(1) == 101 and type(again) is type(layer)
    assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(layer)
