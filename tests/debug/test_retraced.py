"""`pax.debug.why_retraced`: what is new in a call that is traced once more."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.errors import RetracingWarning


def told(function, *calls):
    """The messages of calls with these arguments."""
    watched = pax.debug.why_retraced(function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            watched(*args)
    return [str(each.message) for each in caught]


class Net(pax.Module):
    def __init__(self, rate=0.1):
        super().__init__()
        self.encoder = pax.Sequential(pax.Dropout(rate))
        self.history = []

    def __call__(self, x):
        return self.encoder(x)


def call(net, x):
    return x


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net, x: (net.eval(), x), "net.training: True before, False now"),
        (lambda net, x: (Net(0.2), x), "net.encoder.modules.0"),
        (lambda net, x: (net, x[:1]), "x: float32[2] before, float32[1] now"),
        (lambda net, x: (net, x.astype("int32")), "x: float32[2] before, int32[2] now"),
        (lambda net, x: (net, 1.0), "x: float32[2] before, float32[] (weak: a Python number) now"),
        (lambda net, x: (net.replace(history=[1, 2]), x), "net.history"),
    ],
    ids=["mode", "static", "shape", "dtype", "weak", "list"],
)
def test_what_changed_is_named(change, text):
    net, x = Net(), jnp.ones(2)
    (message,) = told(jax.jit(call), (net, x), change(net, x))
    assert text in message


def test_equal_calls_do_not_warn():
    assert told(jax.jit(call), (Net(), jnp.ones(2)), (Net(), jnp.zeros(2))) == []


def test_it_agrees_with_jax():
    traces = []

    @jax.jit
    def f(net, x):
        traces.append(1)
        return x

    x = jnp.ones(2)
    calls = [(Net(), x), (Net(), 2 * x), (Net().eval(), x), (Net(), 1.0), (Net(), 2.0), (Net(), 1)]
    assert len(told(f, *calls)) == len(traces) - 1


def test_the_call_that_is_most_alike_is_compared():
    x = jnp.ones(2)
    *_, message = told(jax.jit(call), (Net(), x), (Net().eval(), x[:1]), (Net().eval(), x))
    assert message.count("before") == 1


def test_objects_are_named_without_their_addresses():
    (message,) = told(
        jax.jit(lambda net, x: net(x)),
        *[(pax.Lambda(lambda x, scale=scale: x * scale[0]), 1.0) for scale in ([1], [2])],
    )
    assert "0x" not in message and "than before" in message and "net." in message


def test_static_arguments_are_named():
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    x = jnp.ones(2)
    (message,) = told(power, (x, 2), (x, 2), (x, 3), (x, 2))
    assert "n: 2 before, 3 now, a static argument" in message
    named = jax.jit(lambda x, mode: x, static_argnames="mode")
    (message,) = told(named, (x, "fast"), (x, "slow"))
    assert "mode" in message and "'fast'" in message and "'slow'" in message


def test_numbers_that_are_arrays_are_not_reported():
    assert told(jax.jit(lambda x, n: x * n), (jnp.ones(2), 2), (jnp.ones(2), 3)) == []


def test_a_function_that_is_jitted_anew_in_each_call():
    def evaluate(net, x):
        return jax.jit(lambda net, x: net(x))(net, x)

    net, x = Net().eval(), jnp.ones(2)
    (message,) = told(evaluate, (net, x), (net, x))
    assert "made anew" in message and "<lambda>" in message and "outside of the loop" in message


def test_a_function_that_is_jitted_anew_in_a_loop():
    messages = []
    for _ in range(3):
        messages += told(jax.jit(lambda x: x * 2), (jnp.ones(2),))
        messages += told(jax.jit(functools.partial(lambda y, x: x * y, 2)), (jnp.ones(2),))
    assert len(messages) == 4 and all("made anew" in message for message in messages)


def test_equal_arguments_that_jax_distinguishes():
    step, x = pax.debug.why_retraced(jax.jit(lambda x, y: x + y)), jnp.ones(2)
    step(x, x)
    with pytest.warns(RetracingWarning, match="by keyword now: y"):
        step(x, y=x)
    with (
        jax.default_matmul_precision("float32"),
        pytest.warns(RetracingWarning, match="another configuration"),
    ):
        step(x, x)


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "net.data"),
        ([pax.Linear(2, 2), "relu"], [pax.Linear(2, 2), "gelu"], "net.data.1"),
        (("x", jnp.float32), ("y", jnp.float32), "net.data"),
    ],
)
def test_static_data_is_named_by_its_path(one, other, path):
    net = pax.Module().set_attribute("data", one)
    (message,) = told(jax.jit(call), (net, 1.0), (net.replace(data=other), 1.0))
    assert f"got: {path}" in message, message
