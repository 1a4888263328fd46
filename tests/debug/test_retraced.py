"""`pax.debug.why_retraced`: what is new in a call that is traced once more."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax


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
