"""Layers and arrays in functions, odd containers and objects: refused when a module gets them."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import HiddenArrayError


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


class Net(pax.Module):
    def __init__(self, wrap):
        super().__init__()
        self.block = wrap(pax.Linear(4, 4))


@pytest.mark.parametrize("name", HIDING)
def test_a_hidden_layer_is_refused_in_the_constructor(name):
    with pytest.raises(HiddenArrayError) as refused:
        Net(HIDING[name])
    inner = name in ("pax.Lambda", "Sequential")
    assert refused.value.where == ("Lambda.func" if inner else "Net.block")
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
        net = Net(lambda _, value=value: value)
        assert jax.tree.leaves(net) == [] and net.block is not None
