import collections
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pax_export.errors import InvalidArgumentError
from pax_export.export.artifact.structure import collect, rebuild
from pax_export.export.tracing.names import describe_structure, legal_names
from tests.refusals import refused

import jax  # isort: skip

Point = collections.namedtuple("Point", "x y")

nested = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
)


@given(nested)
def test_a_structure_survives_json(tree):
    leaves = jax.tree_util.tree_leaves(tree)
    names = [f"leaf{index}" for index in range(len(leaves))]
    structure = json.loads(json.dumps(describe_structure(tree, names)))
    values = dict(zip(names, leaves))
    assert rebuild(structure, values.get) == tree
    found = {}
    collect(structure, tree, found, "x")
    assert found == values


def test_other_nodes_come_back_as_dicts():
    structure = describe_structure(Point([1], 2), ["a", "b"])
    assert rebuild(structure, str.upper) == {"x": ["A"], "y": "B"}
    found = {}
    collect(structure, Point(["one"], "two"), found, "point")
    assert found == {"a": "one", "b": "two"}


def test_dicts_keep_keys_that_are_numbers():
    structure = json.loads(json.dumps(describe_structure({1: "a", 2: "b"}, ["a", "b"])))
    assert rebuild(structure, str) == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("value", "where", "got"),
    [
        ({"a": [1]}, "x.a", "[...]"),
        ({"a": 1}, "x.a", "..."),
        ({"a": [1, 2], "c": 3}, "x", "{'a': [..., ...], 'c': ...}"),
    ],
)
def test_another_structure_is_refused(value, where, got):
    structure = describe_structure({"a": [0, 0]}, ["p", "q"])
    with refused(InvalidArgumentError, where=where, got=got):
        collect(structure, value, {}, "x")


def test_a_missing_key_is_named():
    with refused(InvalidArgumentError, "'a'"):
        collect(describe_structure({"a": 0}, ["p"]), {"b": 0}, {}, "x")


@pytest.mark.parametrize("value", [{"a": 3}, {"a": 3, "b": None}])
def test_none_fields_may_be_left_out(value):
    into = {}
    collect(describe_structure({"a": 0, "b": None}, ["p"]), value, into, "x")
    assert into == {"p": 3}
    with pytest.raises(InvalidArgumentError):
        collect(describe_structure({"a": 0, "b": None}, ["p"]), {"a": 3, "c": 4}, {}, "x")


@given(st.lists(st.text(max_size=6), max_size=8))
def test_names_are_legal_and_unique(names):
    legal = legal_names(names)
    assert len(set(legal)) == len(names)
    assert all(name[0].isascii() and name[0].isalnum() for name in legal)
    assert legal_names(legal) == legal


def test_dotted_names_are_nested():
    """As a report names the arrays of a cache: a server knows them so."""
    tree = {"keys": (1, {"codes": 2, "scales": 3}), "a.b": 4}
    structure = describe_structure(
        tree, [f"leaf{leaf}" for leaf in jax.tree_util.tree_leaves(tree)]
    )
    flat = {"keys.0": 1, "keys.1.codes": 2, "keys.1.scales": 3, "a.b": 4}
    for value in (tree, flat, {"keys": {"0": 1, "1.codes": 2, "1.scales": 3}, "a.b": 4}):
        found = {}
        collect(structure, value, found, "cache")
        assert found == {"leaf1": 1, "leaf2": 2, "leaf3": 3, "leaf4": 4}
    for wrong in ({**flat, "keys.2": 5}, {**flat, "values.0": 5}, {"keys.0": 1, "a.b": 4}):
        with pytest.raises(InvalidArgumentError):
            collect(structure, wrong, {}, "cache")
