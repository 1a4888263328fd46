"""Arrays in static data are found; those that functions close over are none."""

import functools
import types

import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.core import hidden_arrays
from tests.core.models import Dense, Net


def test_where_arrays_hide():
    array = jnp.ones(2)
    holder = types.SimpleNamespace(deep={"a": (array,)}, layer=Dense(1, 1), number=3)
    holder.itself = holder
    net = pax.Module().set_attribute("child", pax.Module().set_attribute("holder", holder))
    names = [name for name, _ in hidden_arrays(net)]
    assert names == [
        "child.holder.deep.a.0",
        "child.holder.layer.weight",
        "child.holder.layer.bias",
    ]


def test_dicts_that_jax_cannot_sort():
    net = pax.Module().set_attribute("table", {1: np.ones(2), "b": 3})
    assert [name for name, _ in hidden_arrays(net)] == ["table.1"]


def test_leaves_and_closures_are_not_hidden():
    array = jnp.ones(2)
    net = Net().set_attribute("f", lambda x: x + array)
    net = net.set_attribute("g", functools.partial(jnp.add, array))
    assert list(hidden_arrays(net)) == []
