"""Laws of `net.at(...)`, on the random trees of the laws of modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import tree_leaves, tree_map, tree_structure

import pax_export as pax
from pax_export.core import Selection, escape_step, named_leaves, named_modules
from tests.hard.test_laws import TREES, each_tree, picture, tree_of

SEVERAL = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def names_of(tree):
    """All modules and arrays but the root, by their names."""
    named = [name for name, _ in [*named_modules(tree), *named_leaves(tree)] if name]
    return [name for name in Selection.of(tree, "**").names() if name in named]


def some(tree, numbers):
    names = names_of(tree)
    return tree.at([_written(names[n % len(names)]) for n in numbers])


def _written(name):
    return "." + ".".join(map(escape_step, name.split(".")))


def leaves_in(selection):
    """The leaves that a selection covers."""
    none = tree_map(lambda x: np.zeros(()), selection.root)
    return [bool(x) for x in tree_leaves(none.at(selection).map(lambda x: np.ones(())))]


@each_tree
@given(TREES)
def test_every_name_selects_what_it_names(recipe):
    tree = tree_of(recipe)
    named = [name for name, _ in [*named_modules(tree), *named_leaves(tree)]]
    assert {*named} <= {*Selection.of(tree, "**").names()}
    for name in names_of(tree):
        assert tree.at(_written(name)).names() == [name]


@each_tree
@given(TREES, SEVERAL)
def test_set_of_what_get_gave_is_the_same_tree(recipe, numbers):
    tree = tree_of(recipe)
    before = picture(tree)
    selection = some(tree, numbers)
    new = selection.set(selection.get())
    assert new == tree and picture(tree) == before
    assert tree_structure(new) == tree_structure(tree)
    assert selection.replace(lambda old: old) == tree
    assert tree.at("*").replace(lambda path, old: old) == tree
    assert new.at(selection).names() == selection.names()


@each_tree
@given(TREES, SEVERAL)
def test_set_values_can_be_read_back(recipe, numbers):
    tree = tree_of(recipe)
    names = names_of(tree)
    for number in numbers:
        name = _written(names[number % len(names)])
        for value in (jnp.ones(3), pax.Linear(1, 2), None, 7, "text"):
            new = tree.at(name).set(value)
            assert new.at(name).get() is value
            again = tree_of(recipe).at(name).set(value)
            assert tree_structure(new) == tree_structure(again)
            assert new.at(name).set(tree.at(name).get()) == tree


@each_tree
@given(TREES, SEVERAL, SEVERAL)
def test_selections_cover_leaves_as_sets_do(recipe, first, second):
    tree = tree_of(recipe)
    a, b = some(tree, first), some(tree, second)
    in_a, in_b = leaves_in(a), leaves_in(b)
    assert leaves_in(a | b) == [x or y for x, y in zip(in_a, in_b)]
    try:
        assert leaves_in(a & b) == [x and y for x, y in zip(in_a, in_b)]
    except pax.errors.InvalidArgumentError:
        assert not any(x and y for x, y in zip(in_a, in_b))
    try:
        assert leaves_in(~a) == [not x for x in in_a]
        assert leaves_in(~~a) == in_a
    except pax.errors.InvalidArgumentError:
        assert all(in_a)


@each_tree
@given(TREES, SEVERAL)
def test_frozen_is_out_of_parameters_and_comes_back(recipe, numbers):
    tree = tree_of(recipe)
    selection = some(tree, numbers)
    frozen = selection.freeze()
    inside = leaves_in(selection)
    trained = [x and not f for x, f in zip(_trained(tree), inside)]
    assert _trained(frozen) == trained
    assert all(a is b for a, b in zip(tree_leaves(tree), tree_leaves(frozen)))
    assert tree_structure(frozen) == tree_structure(some(tree_of(recipe), numbers).freeze())
    assert frozen.at(selection).unfreeze() == tree
    assert selection.freeze(statistics=True).at(selection).unfreeze() == tree
    assert frozen.at(...).unfreeze() == tree
    merged = frozen | frozen.parameters()
    assert merged == frozen


def _trained(tree):
    none = tree_map(lambda x: np.zeros(()), tree)
    marks = none | tree_map(lambda x: np.ones(()), tree).parameters()
    return [bool(x) for x in tree_leaves(marks)]


@each_tree
@given(TREES, SEVERAL)
def test_modes_and_dtypes_of_parts(recipe, numbers):
    tree = tree_of(recipe)
    selection = some(tree, numbers)
    inside = leaves_in(selection)
    cast = selection.cast(jnp.float16)
    assert tree_structure(cast) == tree_structure(tree)
    for old, new, meant in zip(tree_leaves(tree), tree_leaves(cast), inside):
        floating = jnp.issubdtype(old.dtype, jnp.floating)
        assert new.dtype == (jnp.float16 if meant and floating else old.dtype)
    if any(isinstance(value, pax.Module) for value in selection.values()):
        assert tree.eval().at(selection).train().at(selection).eval() == tree.eval()
    jax.eval_shape(lambda net: net.at(selection).apply(lambda x: x), tree)
