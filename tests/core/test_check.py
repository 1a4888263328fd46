"""Sharing, hidden arrays, differences of structure, and values that are no modules."""

import abc

import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.errors import HiddenArrayError
from tests.core.models import Dense, Free, Net
from tests.refusals import refused


@pytest.mark.parametrize(
    ("value", "inside", "where", "got"),
    [
        (Dense(), lambda a: {"x": a}, "a and b.x", "Dense(din=2, dout=3)"),
        (jnp.ones(2), lambda a: [a], "a and b.0", "float32[2] = [1. 1.]"),
    ],
)
def test_one_value_at_two_paths(value, inside, where, got):
    with refused(ValueError, where=where, got=got):
        Free(a=value, b=inside(value))


def test_equal_arrays_are_not_shared():
    Free(a=jnp.ones(2), b=jnp.ones(2))


def test_slots():
    class Slotted(pax.Module):
        __slots__ = ("x",)

    with refused(ValueError, where="test_slots.<locals>.Slotted", got="__slots__ = ('x',)"):
        Slotted()

    class Empty(pax.Linear):
        __slots__ = ()

    with refused(HiddenArrayError, where="test_slots.<locals>.Empty", got="__slots__ = ()"):
        Empty(1, 1)

    class Interface(abc.ABC):
        __slots__ = ()

        @abc.abstractmethod
        def size(self): ...

    class Fine(pax.Module, Interface):
        def size(self):
            return 1

    assert Fine().scan_bugs()


@pytest.mark.parametrize("value", [jnp.ones(1), [jnp.ones(1)], Dense()])
def test_class_attributes_with_arrays(value):
    class Hidden(pax.Module):
        thing = value

    with refused(ValueError, where="test_class_attributes_with_arrays.<locals>.Hidden.thing"):
        Hidden()


def test_class_attributes_without_arrays():
    class Fine(pax.Module):
        a = None
        b = []
        c = 3
        d = jnp.tanh
        weight = jnp.ones(1)

        def __init__(self):
            self.weight = jnp.zeros(1)

    assert Fine().scan_bugs().a is None
    assert Fine().b is Fine.b


def test_equal_structures():
    assert pax.assert_structure_equal(Net(), Net())
    assert pax.assert_structure_equal([1, {"a": Dense()}], [2, {"a": Dense()}])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda n: n.eval(), "layers.0.training: True against False"),
        (lambda n: n.replace(kind="x"), "kind: 'net' against 'x'"),
        (lambda n: n.replace(layers=[Dense(2, 2)]), "layers: list of 2 against list"),
        (lambda n: n.parameters(), "scale: an array against EmptyNode"),
        (lambda n: n.set_attribute("new", 1), "new: missing in the first tree"),
        (lambda n: n.replace(scale=None), "scale: an array against NoneType"),
        (lambda n: n.replace_node(n.layers[0], Net()), "layers.0: Dense against Net"),
    ],
)
def test_differences_are_named(change, line):
    with refused(AssertionError, line):
        pax.assert_structure_equal(Net(), change(Net()))
    with refused(AssertionError, "a: tuple of 1 against tuple of 2"):
        pax.assert_structure_equal({"a": (1,)}, {"a": (1, 2)})
    with refused(AssertionError, "x.a: missing in the second tree", "x.b: missing in the first"):
        pax.assert_structure_equal({"x": {"a": 1, "c": 3}}, {"x": {"b": 1, "c": 3}})


CALLS = {
    "select_parameters": lambda: pax.select_parameters(3),
    "update_parameters": lambda: pax.update_parameters(3, params=3),
    "freeze_parameters": lambda: pax.freeze_parameters(3),
    "unfreeze_parameters": lambda: pax.unfreeze_parameters(3, origin=3),
    "enable_train_mode": lambda: pax.enable_train_mode(3),
    "enable_eval_mode": lambda: pax.enable_eval_mode(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_is_refused_by_name(name):
    with refused(TypeError, name, got="int: 3") as error:
        CALLS[name]()
    assert isinstance(error.value, pax.errors.PaxError)
