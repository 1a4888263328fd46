"""The traversal, and plans that replay it."""

import jax
from jax.tree_util import tree_flatten, tree_leaves

import pax_export as pax
from pax_export.core import named_leaves, named_modules
from pax_export.core._traversal import cached_by_treedef
from tests.core.models import Dense, Net


def test_names_of_leaves_and_modules():
    names = [name for name, _ in named_leaves(Net())]
    assert names[:2] == ["layers.0.weight", "layers.0.bias"]
    assert names[4:6] == ["parts.a.weight", "parts.a.bias"]
    found = [(path, type(module).__name__) for path, module in named_modules(Net())]
    assert found[0] == ("", "Net")
    assert ("parts.b", "Counter") in found and ("mixed.0", "Dense") in found


def test_a_structural_function_runs_once_for_a_treedef():
    runs = []

    @cached_by_treedef()
    def first_leaf(module, count):
        runs.append(1)
        return tree_leaves(module)[:count]

    for _ in range(3):
        layer = Dense()
        assert first_leaf(layer, 1)[0] is layer.weight
    assert len(runs) == 1
    assert len(first_leaf(Dense(), 2)) == 2
    assert len(runs) == 2


def test_eval_of_equal_treedefs_reuses_one_treedef():
    a, b = Net().eval(), Net().eval()
    assert tree_flatten(a)[1] == tree_flatten(b)[1]
    assert jax.tree_util.tree_structure(pax.Module().eval()) is not None
