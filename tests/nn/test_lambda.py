import functools

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.refusals import refused


def shifted(x, by=1.0):
    return x + by


class Doubler:
    def __call__(self, x):
        return 2 * x


class Named(Doubler):
    def __repr__(self):
        return "double"


def test_calls_the_function_with_all_arguments():
    assert pax.Lambda(shifted)(1.0, by=2.0) == 3.0
    assert pax.Lambda(lambda *args: args)(1, 2) == (1, 2)


@pytest.mark.parametrize(("func", "name"), [
    (jax.nn.relu, "relu"),
    (jax.nn.gelu, "gelu"),
    (jnp.tanh, "tanh"),
    (jnp.add, "add"),
    (jax.lax.add, "add"),
    (jax.jit(shifted), "shifted"),
    (jax.custom_jvp(shifted), "shifted"),
    (lambda x: x, "<lambda>"),
    (abs, "abs"),
    (Doubler, "Doubler"),
    (Doubler(), "Doubler"),
    (Named(), "double"),
    (functools.partial(shifted, by=2), "functools.partial(shifted, by=2)"),
    (functools.partial(jax.nn.relu), "functools.partial(relu)"),
    (functools.partial(max, Doubler(), key=abs), "functools.partial(max, Doubler, key=abs)"),
])  # fmt: skip
def test_printing(func, name):
    """Never an address in memory."""
    layer = pax.Lambda(func)
    assert repr(layer) == f"Lambda({name})"
    assert layer.summary() == f"x => {name}(x)"
    assert layer.summary(return_list=True) == [f"x => {name}(x)"]
    given = pax.Lambda(func, name="activation")
    assert repr(given) == "(activation) Lambda"
    assert given.summary() == "x => activation(x)"


def test_printing_of_a_policy():
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    layer = pax.apply_mp_policy(pax.Lambda(jax.nn.relu), policy)
    assert repr(layer) == "Lambda(relu, mp_policy=FHF)"
    assert layer.summary() == "x => relu(x)  (mp_policy=FHF)"


@pytest.mark.parametrize(
    ("value", "got"),
    [(3, "int: 3"), ("relu", "str: 'relu'"), ([abs], "list: "), (pax.Dropout, "Dropout")],
)
def test_other_values_are_refused(value, got):
    with refused(TypeError, got, where="Lambda"):
        pax.Sequential(pax.Linear(2, 2), value)


def test_identity():
    x = object()
    assert pax.Identity()(x) is x
    assert repr(pax.Identity(name="skip")) == "(skip) Identity(parameters=0, mode=train)"
    assert pax.Identity(training=False).training is False
