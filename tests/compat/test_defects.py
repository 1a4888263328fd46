"""PAX's known defects, as a user of PAX would meet them; each test is one that PAX fails.

Those of layers, networks, graphs, policies and properties are tested in their rooms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import _tree
from tests.optim.steps import make_model
from tests.refusals import refused

HALF = jmp.get_policy("p=f32,c=f16,o=f32")


def structure(tree):
    return jax.tree_util.tree_structure(tree)


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
