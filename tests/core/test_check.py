"""Sharing, hidden arrays, differences of structure, and values that are no modules."""

import abc
import collections
import dataclasses
import functools
import types
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import HiddenArrayError, InvalidArgumentError, SharedNodeError
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


# --- layers and arrays in functions, odd containers and objects are refused ---------------


class OwnDict(dict):
    pass


class OwnList(list):
    pass


@dataclasses.dataclass
class Record:
    layer: object


@dataclasses.dataclass(slots=True)
class Slots:
    layer: object


class SlotsCalled:
    __slots__ = ("layer",)

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def as_method_of_an_object(layer):
    class Closed:
        def __call__(self, x):
            return layer(x)

    return Closed()


class Plain:
    def __init__(self, layer):
        self.inner = {"deep": (layer,)}
        self.itself = self


def in_an_inner_function(layer):
    def outer(x):
        def inner(y):
            return layer(y)

        return inner(x)

    return outer


def as_default(layer):
    def function(x, *, layer=layer):
        return layer(x)

    return function


def through_a_function(layer):
    def inner(x):
        return layer(x)

    return lambda x: inner(x) + 1


global_layer = pax.Linear(4, 4)

HIDING = {
    "jax.jit": jax.jit,
    "jax.vmap": jax.vmap,
    "jax.checkpoint": jax.checkpoint,
    "jax.grad": lambda layer: jax.grad(lambda x: layer(x).sum()),
    "custom_vjp": lambda layer: jax.custom_vjp(lambda x: layer(x)),
    "a partial": functools.partial,
    "a partial of a method": lambda layer: functools.partial(layer.__call__),
    "a Partial": jax.tree_util.Partial,
    "an argument of a partial": lambda layer: functools.partial(pax.Linear.__call__, layer),
    "a bound method": lambda layer: layer.__call__,
    "a lambda": lambda layer: lambda x: layer(x),
    "an inner function": in_an_inner_function,
    "another function": through_a_function,
    "a default": as_default,
    "a global variable": lambda _: lambda x: global_layer(x),
    "a cache": lambda layer: functools.lru_cache(lambda x: layer(x)),
    "pax.Lambda": lambda layer: pax.Lambda(lambda x: layer(x)),
    "Sequential": lambda layer: pax.Sequential(pax.Identity(), lambda x: layer(x)),
    "beside a layer": lambda layer: [pax.Identity(), pax.Linear(1, 1), lambda x: layer(x)],
    "a set": lambda layer: {layer},
    "a deque": lambda layer: collections.deque([layer]),
    "a dict of its own": lambda layer: OwnDict(a=layer),
    "a list of its own": lambda layer: OwnList([layer]),
    "keys that do not sort": lambda layer: {0: layer, "a": 1},
    "a read-only dict": lambda layer: types.MappingProxyType({"a": layer}),
    "a tuple with a set": lambda layer: ({layer}, 1),
    "a dataclass": Record,
    "a dataclass with slots": Slots,
    "an object": Plain,
    "an object with slots": SlotsCalled,
    "a method of an object": as_method_of_an_object,
    "an array of objects": lambda layer: np.array([layer], object),
    "an iterator": lambda layer: iter([layer]),
    "values of a dict": lambda layer: {"a": layer}.values(),
    "a generator": lambda _: (pax.Linear(4, 4) for _ in range(3)),
    "a map": lambda _: map(pax.Linear, (4,), (4,)),
    "a jax array in a lambda": lambda layer: (lambda weight: lambda x: x @ weight)(layer.weight),
    "an array in a partial": lambda layer: functools.partial(jnp.add, layer.bias),
    "numbers in an object": lambda _: types.SimpleNamespace(table=np.ones(3)),
}


class Wrapping(pax.Module):
    def __init__(self, wrap):
        super().__init__()
        self.block = wrap(pax.Linear(4, 4))


@pytest.mark.parametrize("name", HIDING)
def test_a_hidden_layer_is_refused_in_the_constructor(name):
    with pytest.raises(HiddenArrayError) as refused:
        Wrapping(HIDING[name])
    inner = name in ("pax.Lambda", "Sequential")
    assert refused.value.where == ("Lambda.func" if inner else "Wrapping.block")
    assert refused.value.got and refused.value.write


def test_edits_and_calls_hide_nothing_either():
    net = pax.Module().set_attribute("child", pax.Module().set_attribute("act", jax.nn.relu))
    layer = pax.Linear(4, 4)
    with pytest.raises(HiddenArrayError, match="where: Module.act"):
        net.child.set_attribute("act", lambda x: layer(x))
    with pytest.raises(HiddenArrayError, match="where: Module._replaced_methods"):
        net.child.replace_method(act=lambda self, x: layer(x))
    with (
        pytest.raises(HiddenArrayError, match="where: Module.held"),
        pax.experimental.mutable(net) as open_net,
    ):
        open_net.child.held = {layer}


def test_a_module_does_not_hide_itself():
    class Itself(pax.Module):
        def __init__(self, late):
            super().__init__()
            self.call = pax.Lambda(lambda x: self.layer(x)) if late else self.wide
            self.layer = pax.Linear(4, 4)

        def wide(self, x):
            return self.layer(x)

    for late in (False, True):
        with pytest.raises(HiddenArrayError, match="Itself in"):
            Itself(late)


def test_constants_and_functions_are_static():
    table = np.arange(4.0)
    scale = 2.0
    no_arrays = pax.Identity()
    for value in (
        jax.nn.relu,
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: no_arrays(x) * table + scale,
        jax.jit(lambda x, table=table: x + table),
        {"a": {1, 2}, 3: "b"},
        np.random.default_rng(0),
        pax.Linear,
    ):
        net = Wrapping(lambda _, value=value: value)
        assert jax.tree.leaves(net) == [] and net.block is not None


# --- what holds itself is refused before jax sees it, and no other module suffers ---------


class Holder(pax.Module):
    def __init__(self, value):
        super().__init__()
        self.value, self.x = value, jnp.ones(1)


def all_is_well():
    module = Holder([1, [Dense()]])
    return jax.jit(lambda m: m)(module.eval().train()).value[0] == 1


def cyclic_list(*parts):
    value = list(parts)
    value.append(value)
    return value


def cyclic_dict():
    value = {"a": 1}
    value["b"] = (value,)
    return value


def cyclic_deque():
    value = deque([1])
    value.append(value)
    return value


MAKERS = [cyclic_list, lambda: cyclic_list(jnp.ones(1)), cyclic_dict, cyclic_deque]


@pytest.mark.parametrize("make", MAKERS)
def test_a_container_in_itself_is_refused(make):
    @pax.pure
    def put(module):
        module.value = make()
        return module

    for build in (
        lambda: Holder(make()),
        lambda: Holder([make()]),
        lambda: Holder(1).set_attribute("other", make()),
        lambda: Holder(1).replace(value=make()),
        lambda: put(Holder(1)).copy(),
    ):
        with pytest.raises(InvalidArgumentError):
            build()
        assert all_is_well()


@pytest.mark.parametrize("leaf", [1, jnp.ones(1), Dense()], ids=["static", "array", "module"])
@pytest.mark.parametrize("outer", [lambda x: [x], lambda x: {"a": (x,)}], ids=["lists", "dicts"])
def test_containers_nest_to_a_depth_of_one_hundred(outer, leaf):
    value, more = leaf, leaf
    for _ in range(50 if isinstance(outer(1), dict) else 100):
        value = outer(value)
    assert jax.tree_util.tree_leaves(Holder(value))
    for _ in range(10_000):
        more = outer(more)
    with pytest.raises(InvalidArgumentError, match="more than 100 containers"):
        Holder(more)
    assert all_is_well()


def test_a_list_put_into_itself_later_is_refused():
    for first in (1, jnp.ones(1)):
        with (
            refused(InvalidArgumentError, where="Holder.value"),
            pax.experimental.mutable(Holder([first])) as module,
        ):
            module.value.append(module.value)
        assert all_is_well()


def test_one_list_at_two_places_is_no_circle():
    names = ["a"]
    assert Holder([names, (names, {"k": names})]).copy().value[1][1]["k"] == ["a"]


def test_a_module_in_itself_is_refused():
    class Own(pax.Module):
        def __init__(self):
            super().__init__()
            self.me = [self]

    with refused(SharedNodeError, "me.0"):
        Own()
    assert all_is_well()

    @pax.pure
    def put(module):
        module.me = module
        return module

    with pytest.raises(SharedNodeError):
        put(Holder(1))
    assert all_is_well()
