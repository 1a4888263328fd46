"""What is a subtree, and the way through jax and back."""

import copy
import pickle
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

import pax_export as pax
from pax_export.core import flatten, named_leaves, named_modules
from pax_export.core._traversal import cached_by_treedef
from pax_export.core._tree import attributes_now, unflatten
from tests.core.models import Dense, Free, Net
from tests.refusals import refused


class Attributes(pax.Module):
    """Every kind of attribute that section 2.2 of the reference names."""

    def __init__(self):
        super().__init__()
        self.a = jnp.ones(2)
        self.b = np.ones(2)
        self.c = np.float32(1)
        self.d = 1.0
        self.e = None
        self.f = []
        self.g = [None]
        self.h = [jnp.ones(1), None]
        self.i = [jnp.ones(1), 1]
        self.j = {"x": [Dense()]}
        self.k = pax.EmptyNode()
        self.l = [pax.EmptyNode(), 2]
        self.m = jax.ShapeDtypeStruct((1,), "float32")
        self.n = jax.random.key(0)
        self.q = (jnp.ones(1), "s")


def test_pure_subtrees_come_first_then_mixed_ones():
    names = Attributes().pytree_attributes
    assert names == ("a", "b", "h", "j", "k", "n", "i", "l", "q")


def test_round_trip_keeps_leaves_and_static_data():
    module = Attributes()
    leaves, treedef = tree_flatten(module)
    again = tree_unflatten(treedef, leaves)
    assert again == module
    assert all(x is y for x, y in zip(leaves, tree_leaves(again)))
    for name in "cdefgm":
        assert getattr(again, name) == getattr(module, name)
    assert again.i[1] == 1 and again.i is not module.i
    assert again.q[1] == "s"
    assert list(vars(again)) == list(vars(module))


def test_unflatten_runs_no_constructor():
    calls = []

    class Loud(pax.Module):
        def __init__(self):
            calls.append(1)
            self.x = jnp.ones(1)

    module = Loud()
    tree_map(lambda x: x + 1, module)
    assert calls == [1]


def test_key_paths_are_attribute_names():
    paths = [keystr(path) for path, _ in tree_flatten_with_path(Net())[0]]
    assert paths[:2] == [".layers[0].weight", ".layers[0].bias"]
    assert ".parts['b'].count" in paths
    assert paths[-2:] == [".mixed[0].weight", ".mixed[0].bias"]


def test_equal_recipes_share_one_moduledef():
    first, second = flatten(Dense())[1], flatten(Dense())[1]
    assert first is second
    assert tree_structure(Net()) == tree_structure(Net())


@pytest.mark.parametrize("change", [{"din": 9}, {"_name": "x"}, {"_training": False}, {"din": 2.0}])
def test_other_static_data_is_another_structure(change):
    module = Dense()
    assert tree_structure(module.replace(**change)) != tree_structure(module)


def test_attributes_are_filled_in_when_somebody_looks():
    module = tree_map(lambda x: x, Dense(name="d"))
    assert vars(module)["din"] == 2
    module = tree_map(lambda x: x, Dense(name="d"))
    assert "weight" in dir(module)
    module = tree_map(lambda x: x, Dense(name="d"))
    assert (module.name, module.training) == ("d", True)
    with refused(AttributeError, "'Dense'", "'wait'"):
        module.wait


def test_class_defaults_do_not_hide_attributes_of_rebuilt_modules():
    class Pooled(pax.Module):
        size = 1

        def __init__(self):
            self.size = 7
            self.x = jnp.ones(1)

    assert tree_map(lambda x: x, Pooled()).size == 7


def test_getattr_of_a_user_class_is_asked_last():
    class Open(pax.Module):
        def __init__(self):
            self.x = jnp.ones(1)

        def __getattr__(self, name):
            if name == "magic":
                return self.x + 1
            raise AttributeError(name)

    module = tree_map(lambda x: x, Open())
    assert module.magic.shape == (1,)
    assert module.x.shape == (1,)
    assert not hasattr(module, "other")


def test_appending_to_an_empty_list_is_seen():
    def added(module):
        module.items.append(jnp.ones(1))
        assert module.pytree_attributes == ("items",)
        return module

    module = pax.pure(added)(Free(items=[]))
    assert module.pytree_attributes == ("items",) and len(tree_leaves(module)) == 1


def test_static_objects_are_shared_with_copies():
    thing = type("Thing", (), {})()
    assert pax.Module().set_attribute("thing", thing).copy().thing is thing


def test_static_objects_without_hash_are_compared_and_kept():
    @dataclass
    class Config:
        width: int

    first, second, other = (Dense().set_attribute("config", Config(n)) for n in (3, 3, 4))
    assert tree_structure(first) == tree_structure(second) != tree_structure(other)
    first.eval()  # a plan for this treedef is known now
    off = second.eval()
    assert off.config == second.config and off.config is not second.config
    assert off.config is not first.eval().config


def test_trees_of_shapes_and_masks_keep_their_structure():
    shapes = jax.eval_shape(Net)
    assert isinstance(shapes.eval().layers[0].weight, jax.ShapeDtypeStruct)
    assert len(tree_leaves(shapes.eval())) == len(tree_leaves(Net()))
    mask = tree_map(lambda x: True, Net())
    assert len(tree_leaves(mask.replace(kind="mask").train())) == len(tree_leaves(mask))
    assert tree_structure(mask.parameters()) == tree_structure(Net().parameters())


@pytest.mark.parametrize("more", [[], [Dense()]], ids=["static", "module"])
def test_masks_of_a_mixed_list_keep_its_static_part(more):
    module = pax.Module().set_attribute("items", [jnp.ones(2), 5, *more])
    mask = tree_map(lambda x: False, module)
    assert tree_structure(mask) == tree_structure(module)
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert tree_structure(again) == tree_structure(module)
    back = tree_map(lambda keep, x: x, mask, module)
    assert back == module and back.items[1] == 5
    assert module.eval().train() == module
    assert module.parameters() | module == module


@pytest.mark.parametrize("more", [{}, {"b": jnp.ones(3)}], ids=["one", "two"])
def test_trees_with_none_for_arrays_of_a_mixed_dict_can_be_combined(more):
    """As `equinox.partition` and `combine` do."""
    module = pax.Module().set_attribute("items", {"a": jnp.ones(2), "s": "text", **more})
    module = module.set_attribute("mixed", [jnp.ones(1), "text"])
    chosen = tree_map(lambda x: x if x.size == 3 else None, module)
    for part in (chosen, copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen)), chosen.copy()):
        assert tree_structure(part) == tree_structure(chosen)
        back = tree_map(
            lambda x, y: x if y is None else y, module, part, is_leaf=lambda x: x is None
        )
        assert tree_structure(back) == tree_structure(module)
        assert back.items["s"] == "text" and back.mixed[1] == "text"


def test_dict_subtrees_come_in_sorted_order():
    names = [type(m).__name__ for m in Net().submodules()]
    assert names == ["Dense", "Dense", "Dense", "Counter", "Dense"]


def test_empty_nodes_are_equal_have_no_leaves_and_no_hash():
    assert pax.EmptyNode() == pax.EmptyNode()
    assert repr(pax.EmptyNode()) == "EmptyNode"
    assert tree_leaves(pax.EmptyNode()) == []
    with pytest.raises(TypeError):
        hash(pax.EmptyNode())


def test_equality_is_identity_of_leaves():
    module = Dense()
    assert module == module.copy()
    assert module == tree_map(lambda x: x, module)
    assert module != Dense()
    assert module != module.eval()
    assert hash(Dense()) == hash(Dense()) != hash(Dense(3, 3))


def test_classes_made_in_functions_work_at_once():
    def make():
        class Local(pax.Module):
            def __init__(self):
                self.x = jnp.ones(2)

        return Local()

    assert jax.jit(lambda m: m.x.sum())(make()) == 2
    assert jax.grad(lambda m: m.x.sum())(make()).x.shape == (2,)


def test_a_dict_that_jax_cannot_sort_is_static():
    module = Dense().set_attribute("table", {1: "a", "b": 2})
    assert module.copy().table == {1: "a", "b": 2}
    assert module.pytree_attributes == ("weight", "bias")


def test_jit_directly_on_a_method():
    class Fast(Dense):
        @jax.jit
        def __call__(self, x):
            return x @ self.weight

    assert Fast()(jnp.ones((1, 2))).shape == (1, 3)


def test_a_rebuilt_module_keeps_the_pair_and_nothing_else():
    children, moduledef = flatten(Dense())
    new = unflatten(moduledef, children)
    assert type(new) is Dense and attributes_now(new) == {}
    assert flatten(new)[0] is children and flatten(new)[1] is moduledef


def test_modules_are_rebuilt_in_several_threads():
    children, moduledef = flatten(Dense())
    bad = []

    def work():
        for _ in range(2000):
            new = unflatten(moduledef, children)
            if flatten(new)[0] is not children or new.din != 2:
                bad.append(new)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


# --- the traversal, and plans that replay it ----------------------------------------------


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
