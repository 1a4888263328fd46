"""Modules that a policy must treat right, and the policies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jmp

import pax_export as pax

F, H, B = jnp.float32, jnp.float16, jnp.bfloat16
FHF = jmp.Policy(F, H, F)
HHH = jmp.Policy(H, H, H)


class Notes:
    """What calls note down; an object, because lists of a module cannot be changed."""

    def __init__(self):
        self.lines = []


class Layer(pax.ParameterModule):
    """Arrays alone and in containers, a submodule, static data, every kind of method."""

    def __init__(self):
        super().__init__()
        self.weight = jnp.full((2, 3), 1 / 3)
        self.pair = [jnp.ones(3), {"deep": jnp.full(3, 0.1)}]
        self.mixed = [jnp.ones(3), jax.nn.relu]
        self.count = jnp.array(0, jnp.int32)
        self.child = Child()
        self.children = [Child(), Child()]
        self.seen = Notes()
        self.scale = 2.0

    def __call__(self, x):
        self.seen.lines.append((x.dtype, self.weight.dtype, self.pair[1]["deep"].dtype))
        return x @ self.weight

    def dtypes(self):
        arrays = [self.weight, *jax.tree_util.tree_leaves(self.pair), self.mixed[0]]
        children = [self.child.value, *[child.value for child in self.children]]
        return {x.dtype.name for x in arrays}, {x.dtype.name for x in children}

    def step(self, amount):
        self.weight = self.weight + amount
        self.pair = [self.pair[0] * 2, self.pair[1]]
        self.count = self.count + 1
        self.child.grow()
        return self

    def fail(self):
        self.weight = self.weight + 1
        raise RuntimeError("on purpose")

    def swap(self):
        first, second = self.pair
        self.pair = [second["deep"], {"deep": first}]

    def change_in_place(self):
        self.pair[0] = self.pair[0] + 1

    def append_child(self):
        self.children.append(Child())

    def scaled(self):
        return self.replace(count=self.count + 1)

    def forget(self):
        del self.scale
        self.extra = jnp.ones(2, H)

    def give_back(self, value):
        return value

    def nested(self, x):
        return self.give_back(x).dtype

    @jax.jit
    def jitted(self, x):
        return x + self.weight.sum()

    bound = functools.partialmethod(give_back, jnp.ones(1))

    @staticmethod
    def static(x):
        return x.dtype

    @classmethod
    def of_class(cls, x):
        return x.dtype

    @property
    def weight_dtype(self):
        return self.weight.dtype

    @functools.cached_property
    def total(self):
        return self.weight.sum()

    def use_total(self):
        return self.total.dtype.name


class Child(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.value = jnp.ones(2)

    def grow(self):
        self.value = self.value + 1
