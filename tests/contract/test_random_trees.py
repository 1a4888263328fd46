"""Any tree of modules, containers, arrays and static data keeps all laws."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import pax_export as pax
from pax_export.core import modules_and_leaves, named_leaves
from tests.contract.table import leaves_equal


class Tree(pax.Module):
    """Holds what it is given, and trains its attribute ``a``."""

    parameters = pax.parameters_method("a")

    def __init__(self, a: Any = None, b: Any = None, c: Any = None):
        super().__init__()
        self.a, self.b, self.c = a, b, c


class Weights(pax.ParameterModule):
    """Holds what it is given; all of it is trained."""

    def __init__(self, held: Any):
        super().__init__()
        self.held = held


class Pair(tuple):
    """Static: jax does not know this kind of tuple."""


def array() -> np.ndarray:
    return np.zeros(2, np.float32)


# Made anew for each example: an array or a module stands at one place of a tree.
LAYERS = (
    lambda: pax.Linear(1, 2),
    lambda: pax.BatchNorm1D(1, create_scale=False),
    lambda: pax.Dropout(0.5),
    lambda: pax.EMA(array(), 0.9, debias=True),
    lambda: pax.Sequential(pax.Linear(1, 1), jax.nn.relu),
    pax.EmptyNode,
    array,
)
STATIC = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(allow_nan=True, width=16),
    st.text(max_size=2),
    st.sampled_from([jax.nn.relu, np.float32, Pair((1, 2)), {1, 2}, np.dtype("int8"), slice]),
)
LEAVES = st.one_of(STATIC, st.sampled_from(LAYERS).map(lambda make: make()))


def containers(children: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("xyz"), children, max_size=3),
        st.builds(Weights, children),
        st.builds(Tree, children, children, children),
    )


NODES = st.recursive(LEAVES, containers, max_leaves=8)
TREES = st.builds(Tree, NODES, NODES, NODES)

each_tree = settings(max_examples=60, deadline=None)


@each_tree
@given(TREES)
def test_flatten_and_unflatten(tree):
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    again = jax.tree_util.tree_unflatten(treedef, leaves)
    assert again == tree and hash(again) == hash(tree)
    assert jax.tree_util.tree_structure(again) == treedef
    assert again.pytree_attributes == tree.pytree_attributes
    assert again.summary() == tree.summary()
    assert tree.copy() == tree
    named = named_leaves(tree)
    assert [id(leaf) for _, leaf in named] == [id(leaf) for leaf in leaves]
    assert len({name for name, _ in named}) == len(leaves)
    assert all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves)


@each_tree
@given(TREES)
def test_modes(tree):
    off = tree.eval()
    assert not any(module.training for module in modules_and_leaves(off)[0])
    assert off.train() == tree
    assert off != tree
    assert jax.tree_util.tree_structure(tree.eval()) == jax.tree_util.tree_structure(off)


@each_tree
@given(TREES)
def test_parameters(tree):
    parameters = tree.parameters()
    assert parameters.parameters() == parameters
    assert parameters | tree == tree
    assert tree | parameters == tree
    assert tree.update_parameters(parameters) == tree
    frozen = pax.freeze_parameters(tree)
    assert jax.tree_util.tree_leaves(frozen.parameters()) == []
    assert pax.unfreeze_parameters(frozen, origin=tree) == tree


@each_tree
@given(TREES)
def test_weights_and_copies(tree):
    assert tree.load_state_dict(tree.state_dict()) == tree
    assert leaves_equal(pickle.loads(pickle.dumps(tree)), tree)
    assert leaves_equal(copy.deepcopy(tree), tree)
    assert copy.copy(tree) == tree


@each_tree
@given(TREES)
def test_pure_and_jit(tree):
    @pax.pure
    def with_more(tree):
        tree.c = np.ones(3)
        return tree

    changed = with_more(tree)
    assert "c" in changed.pytree_attributes
    assert changed.replace(c=tree.c) == tree
    traces = []
    count = jax.jit(lambda tree: traces.append(tree) or len(jax.tree_util.tree_leaves(tree)))
    assert count(tree) == count(tree.copy()) == count(pickle.loads(pickle.dumps(tree)))
    assert len(traces) == 1
