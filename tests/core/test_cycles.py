"""What holds itself is refused before jax sees it, and no other module suffers."""

from collections import deque

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.errors import InvalidArgumentError, SharedNodeError
from tests.core.models import Dense
from tests.refusals import refused


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
