"""Flattener: values in, values out; copies, names, modes, one trace."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import flatten, named_leaves
from pax_export.experimental import Flattener
from tests.core.models import Counter, Dense, Net
from tests.refusals import refused


def deep_net():
    return pax.Sequential(*[pax.Sequential(Dense(2, 2), jnp.tanh) for _ in range(20)])


def test_values_come_back_with_the_same_arrays():
    net, tree = Net(), {"a": [jnp.ones(2), None], "b": (np.zeros(3),)}
    flat = Flattener(net=net, tree=tree)
    assert flat.net == net
    assert jax.tree.structure(flat.tree) == jax.tree.structure(tree)
    assert all(map(lambda a, b: a is b, jax.tree.leaves(flat.tree), jax.tree.leaves(tree)))
    assert flat.summary().splitlines()[1] == f"└── net: {net.summary().splitlines()[0]}"
    assert repr(flat) == "Flattener(values=[net, tree], elements=34, mode=train)"


def test_leaves_and_treedefs_as_pax_names_them():
    net = Dense(2, 2)
    flat = Flattener(net=net, x=jnp.ones(1))
    assert [leaf is own for leaf, own in zip(flat.leaves_dict["net"], [net.weight, net.bias])]
    assert flat.treedef_dict["net"] == jax.tree.structure(net)
    assert [name for name, _ in named_leaves(flat)] == [
        "leaves_dict.net.0",
        "leaves_dict.net.1",
        "leaves_dict.x.0",
    ]
    assert {"net", "x"} <= set(dir(flat))


def test_other_values_are_static():
    flat = Flattener(state=(1, jnp.ones(2), "text", jnp.tanh, 2.5), none=None, empty=[])
    assert flat.state[0] == 1 and flat.state[2:] == ("text", jnp.tanh, 2.5)
    assert flat.none is None and flat.empty == []
    assert len(jax.tree.leaves(flat)) == 1
    other = Flattener(state=(True, jnp.ones(2), "text", jnp.tanh, 2.5), none=None, empty=[])
    assert jax.tree.structure(flat) != jax.tree.structure(other)
    doubled = jax.tree.map(lambda x: 2 * x, flat)
    np.testing.assert_array_equal(doubled.state[1], [2.0, 2.0])


def test_trees_of_masks_and_shapes_come_back():
    mask = jax.tree.map(lambda x: x.ndim > 1, Net())
    assert jax.tree.leaves(Flattener(mask=mask).mask) == jax.tree.leaves(mask)
    shapes = jax.eval_shape(lambda: Flattener(net=Net()))
    assert [x.shape for x in jax.tree.leaves(shapes.net)] == [
        x.shape for x in jax.tree.leaves(Net())
    ]


def test_flattening_does_not_depend_on_how_many_modules_there_are():
    net = deep_net()
    flat = Flattener(net=net)
    leaves, treedef = jax.tree.flatten(flat)
    assert len(leaves) == 40
    # The flattener, its dict, one list; the net has a node for each module.
    assert treedef.num_nodes == 3 + len(leaves)
    assert jax.tree.structure(net).num_nodes > 80
    assert not flatten(flat)[1].changing


def test_passes_through_jit_with_one_trace():
    traced = []

    @jax.jit
    def step(flat, x):
        traced.append(1)
        net, counter = flat.net, flat.counter
        net, y = net % x
        counter, y = counter % y
        return flat.update(net=net, counter=counter), y

    def new():
        net = pax.Sequential(pax.Linear(3, 3), pax.BatchNorm1D(3), jax.nn.relu)
        return Flattener(net=net, counter=Counter())

    flat = new()
    for _ in range(3):
        flat, _ = step(flat, jnp.ones((2, 5, 3)))
    step(new(), jnp.ones((2, 5, 3)))
    assert len(traced) == 1
    assert int(flat.counter.count) == 3
    assert float(flat.net[1].ema_mean.debias) == 1.0


def test_d27_update_leaves_the_original_as_it_was():
    flat = Flattener(net=pax.Linear(3, 3), x=jnp.ones(1))
    before = jax.tree.structure(flat)
    new = flat.update(net=pax.Linear(4, 4), more=jnp.zeros(2))
    assert new.net.summary() == "Linear(in_dim=4, out_dim=4, with_bias=True)"
    assert new.more.shape == (2,) and new.x is flat.x
    assert flat.net.summary() == "Linear(in_dim=3, out_dim=3, with_bias=True)"
    assert not hasattr(flat, "more")
    assert jax.tree.structure(flat) == before
    assert type(flat.eval().update(x=jnp.zeros(1)).eval()) is Flattener
    assert flat.eval().update(x=jnp.zeros(1)).training is False


@dataclasses.dataclass
class Config:  # has == but no hash
    size: int


class Configured(Dense):
    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda flat: pickle.loads(pickle.dumps(flat))]
)
def test_d28_copies_and_pickles(duplicate):
    flat = Flattener(net=Net(), opt=[jnp.ones(2), 3]).eval()
    again = duplicate(flat)
    assert type(again) is Flattener
    assert jax.tree.structure(again) == jax.tree.structure(flat)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(flat)):
        np.testing.assert_array_equal(a, b)
    assert again.opt[1] == 3
    frozen = pax.freeze_parameters(flat)
    assert type(duplicate(frozen)) is type(frozen)


def test_pickles_keep_masks_and_functions():
    flat = Flattener(net=Dense(), rest=(jax.nn.relu, jnp.ones(2), 3))
    masks = jax.tree.map(lambda x: x.ndim > 1, flat)
    for value in (flat, masks):
        again = pickle.loads(pickle.dumps(value))
        assert jax.tree.structure(again) == jax.tree.structure(value)
        assert again.rest[0] is jax.nn.relu
    assert jax.tree.leaves(again) == jax.tree.leaves(masks) == [True, False, False]


def test_one_recipe_gives_one_treedef_in_any_order():
    first = Flattener(a=Net(), b=jnp.ones(1))
    second = Flattener(b=jnp.ones(1), a=Net())
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(first) == hash(second)


def test_equal_objects_without_a_hash_are_not_exchanged():
    first, second = Flattener(net=Configured(Config(1))), Flattener(net=Configured(Config(1)))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for flat in (first, first.eval()):  # a dataclass can change, so each has its own copy
        flat.net.config.size = 9
        assert first.net.config == second.net.config == second.eval().net.config == Config(1)


@pytest.mark.parametrize(
    "name", ["update", "parameters", "leaves_dict", "treedef_dict", "name", "training", "_x"]
)
def test_d29_reserved_names_are_refused(name):
    flat = Flattener(net=Dense())
    for call in (Flattener, flat.update):
        with refused(ValueError, where=f"Flattener.{name}"):
            call(**{name: jnp.ones(1)})


def test_d30_messages_say_what_there_is():
    flat = Flattener(net=Dense(), opt=jnp.ones(1))
    with pytest.raises(AttributeError, match="no value 'model'"):
        flat.model
    with refused(ValueError, "flattener.net.parameters()"):
        flat.parameters()


class Holder(pax.Module):
    def __init__(self, flat):
        super().__init__()
        self.parts = [flat, Dense()]


def test_d31_modes_reach_the_stored_modules():
    flat = Flattener(net=Net(), others={"x": jnp.ones(1), "list": [pax.Dropout(0.5), 3]})
    for outer in (lambda flat: flat, lambda flat: Holder(flat)):

        def stored(module):
            return module.parts[0] if isinstance(module, Holder) else module

        module = outer(flat)
        evaluated = module.eval()
        for value, training in ((module, True), (evaluated, False), (evaluated.train(), True)):
            flattener = stored(value)
            assert flattener.training is training
            assert flattener.net.training is training
            assert flattener.net.layers[1].training is training
            assert flattener.others["list"][0].training is training
        assert stored(evaluated).others["list"][1] == 3
        assert evaluated.train() == module
        assert jax.tree.leaves(evaluated)[0] is jax.tree.leaves(module)[0]


def test_a_holder_of_a_flattener_has_no_parameters_either():
    with refused(ValueError, "trainable"):
        Holder(Flattener(net=Dense())).parameters()


def test_one_array_in_two_values_is_refused():
    net = Dense()
    with refused(ValueError, "leaves_dict.a.0", "leaves_dict.b.0"):
        Flattener(a=net, b=net)
    flat = Flattener(a=net)
    with refused(ValueError, "array"):
        flat.update(b=net.weight)


def test_values_can_be_read_in_a_subclass_constructor():
    class Pair(Flattener):
        def __init__(self):
            assert not hasattr(self, "net")
            super().__init__(net=Dense())
            self.first = self.net.weight.shape

    assert Pair().first == (2, 3)
    again = copy.deepcopy(Pair().eval())
    assert type(again) is Pair and again.first == (2, 3) and again.net.training is False
