"""PAX's known defects, as a user of PAX would meet them; each test is one that PAX fails.

Those of layers, networks and graphs are tested in their rooms.
"""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import _tree
from tests.optim.steps import X, Y, loss_fn, make_model
from tests.refusals import refused

HALF = jmp.get_policy("p=f32,c=f16,o=f32")


def structure(tree):
    return jax.tree_util.tree_structure(tree)


def frozen_and_under_policies():
    net = make_model()
    return net.set(0, pax.freeze_parameters(net[0])).apply(pax.experimental.default_mp_policy)


def test_freezing_and_policies_do_not_make_jit_trace_again():
    traces = []

    @jax.jit
    def predict(net, x):
        traces.append(x)
        return net.eval() % x

    for _ in range(3):
        predict(frozen_and_under_policies(), X)
    assert len(traces) == 1


def test_frozen_modules_under_policies_pickle_and_train_on():
    net = frozen_and_under_policies()
    for again in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert structure(again) == structure(net)
        again, _ = again % X
        assert float(loss_fn(again, X, Y)[0]) == float(loss_fn(net, X, Y)[0])


def test_a_policy_taken_off_a_frozen_module():
    layer = pax.unwrap_mp_policy(pax.freeze_parameters(pax.apply_mp_policy(pax.Linear(2, 3), HALF)))
    assert repr(layer) == "Linear(in_dim=2, out_dim=3, with_bias=True)"
    assert jax.tree_util.tree_leaves(layer.parameters()) == []


class Failing(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.weights = [jnp.full(3, 1 / 3)]
        self.weight = jnp.full(3, 1 / 3)

    def __call__(self, x):
        self.weight = self.weight + x
        raise RuntimeError("on purpose")

    def dtypes(self):
        return {str(self.weight.dtype), str(self.weights[0].dtype)}


def test_an_exception_under_a_policy_leaves_the_precision_of_the_weights():
    net = pax.apply_mp_policy(Failing(), HALF)
    before = net.weight
    with refused(RuntimeError, "on purpose"):
        pax.pure(net)(jnp.ones(3))
    with pytest.raises(ValueError):
        net(jnp.ones(3))  # immutable here
    assert net.weight is before and net.weight.dtype == jnp.float32


def test_a_policy_casts_arrays_in_containers():
    assert pax.apply_mp_policy(Failing(), HALF).dtypes() == {"float16"}


def test_a_net_that_is_wrapped_in_part_gets_the_default_policies():
    net = pax.Sequential(pax.apply_mp_policy(pax.Linear(2, 2), HALF), pax.Linear(2, 2))
    wrapped = net.apply(pax.experimental.default_mp_policy)
    assert [repr(wrapped[i])[-4:] for i in (0, 1)] == ["FHF)", "FHF)"]


@pytest.mark.parametrize("where", ["constructor", "pure"])
def test_the_cost_of_attributes(monkeypatch, where):
    """Counts looks at values, not seconds."""
    looks = []
    kind_of = _tree.kind_of
    monkeypatch.setattr(_tree, "kind_of", lambda value: (looks.append(1), kind_of(value))[1])

    class Many(pax.Module):
        def __init__(self, count):
            super().__init__()
            self.fill(count if where == "constructor" else 0)

        def fill(self, count):
            for index in range(count):
                setattr(self, f"attribute_{index}", np.ones(1))
            return self

    def cost(count):
        looks.clear()
        module = Many(count)
        if where == "pure":
            pax.pure(Many.fill)(module, count)
        return len(looks)

    small = cost(20)
    assert small > 0 and cost(80) < 5 * small


def test_properties_are_not_evaluated():
    class Careful(pax.Module):
        @property
        def size(self):
            raise RuntimeError("not before it is asked for")

    net = Careful().eval().replace(_name="x")
    with refused(RuntimeError, "not before"):
        _ = net.size


def test_trees_of_anything_change_modes_and_are_replaced():
    """Shapes, masks, shardings, numbers: as leaves they are as good as arrays."""
    layer = pax.Linear(2, 3)
    shapes = jax.eval_shape(lambda: pax.Linear(2, 3))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    objects = [1000.5, True, sharding, np.float32(2)]
    trees = [shapes, *[jax.tree_util.tree_map(lambda _, x=x: x, layer) for x in objects]]
    for tree in trees:
        for changed in (tree.eval().train(), tree.replace(in_dim=2), tree.parameters()):
            assert structure(changed) == structure(layer)
            assert jax.tree_util.tree_leaves(changed) == jax.tree_util.tree_leaves(tree)
        assert pax.pure(lambda m: m)(tree.scan_bugs()) == tree
        assert tree.replace(weight=jnp.ones((2, 3))).pytree_attributes == ("weight", "bias")


def test_set_attribute_refuses_shared_values():
    net = make_model()
    for value in (net[0], net[0].weight, [net[0].weight], net):
        with pytest.raises(ValueError):
            net.set_attribute("again", value)


def test_structures_that_differ_always_raise():
    layer = pax.BatchNorm1D(2)
    pairs = [
        (layer, layer.parameters()),
        (layer, layer.eval()),
        ([layer], (layer,)),
        ({"a": layer}, {"b": layer}),
        (layer, pax.freeze_parameters(layer)),
        (layer, None),
        (jnp.ones(1), [jnp.ones(1)]),
    ]
    for a, b in pairs:
        with refused(AssertionError, "differ:\n  - "):
            pax.assert_structure_equal(a, b)
