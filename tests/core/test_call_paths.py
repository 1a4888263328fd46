"""Errors raised inside of a net name the module, by its path from the root."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax


class Fails(pax.ParameterModule):
    """Raises, or has jax raise, where its input is what it is not made for."""

    def __init__(self, dim: int = 3):
        super().__init__()
        self.weight = jnp.ones((dim, dim))

    def __call__(self, x):
        return x @ self.weight


class Layer(pax.Module):
    def __init__(self):
        super().__init__()
        self.norm = pax.Identity()
        self.attention = Fails()

    def __call__(self, x):
        return self.attention(self.norm(x))


class Encoder(pax.Module):
    def __init__(self, count: int = 3):
        super().__init__()
        self.layers = [Layer() for _ in range(count)]

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x if number < 2 else x[:, :2])
        return x


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def __call__(self, x):
        return self.encoder(x)


def notes_of(function, *args):
    with pytest.raises(Exception) as caught:  # of jax, numpy or the user
        function(*args)
    return [note for note in getattr(caught.value, "__notes__", ()) if "the call of" in note]


X = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x: net(x),
        lambda net, x: net % x,
        lambda net, x: jax.jit(lambda net, x: net(x))(net, x),
        lambda net, x: pax.grad(lambda net: net(x).sum())(net),
        lambda net, x: jax.eval_shape(net, x),
    ],
    ids=["call", "pure", "jit", "grad", "eval_shape"],
)
def test_the_path_from_the_root_that_was_called(call):
    assert notes_of(call, Net(), X) == ["in the call of encoder.layers.2.attention (Fails) in Net"]


class Child(Fails):
    def __call__(self, x):
        return super().__call__(x)


HALF = jmp.get_policy("p=f32,c=f16,o=f32")
STACKED = pax.transforms.Scan(Fails, length=4, scan_output=False)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Layer(), "attention (Fails) in Layer"),
        (lambda: Fails(), "Fails"),
        (lambda: pax.Sequential(STACKED(3)), "modules.0.scan_module (Fails) in Sequential"),
        (
            lambda: pax.Sequential(pax.apply_mp_policy(Fails(), HALF)),
            "modules.0 (Fails) in Sequential",
        ),
        (lambda: pax.Sequential(Child()), "modules.0 (Child) in Sequential"),
    ],
    ids=["inner module", "alone", "scan", "policy", "method of a base class"],
)
def test_a_module_is_named_once(make, where):
    assert notes_of(make(), X[:, :2]) == [f"in the call of {where}"]


def test_an_error_of_the_users_keeps_its_class_and_other_notes():
    class Mine(Exception):
        pass

    def fail(x):
        error = Mine("no")
        error.add_note("see the manual")
        raise error

    net = pax.Sequential(pax.Identity(), fail)
    with pytest.raises(Mine) as caught:
        net(X)
    assert caught.value.__notes__[0] == "see the manual"
    assert caught.value.__notes__[1] == "in the call of modules.1 (Lambda) in Sequential"


def test_a_caught_error_leaves_no_call_path():
    class Tries(pax.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Fails(2), Fails(3)

        def __call__(self, x):
            try:
                return self.first(x)
            except TypeError:
                return self.second(x)

    assert Tries()(X).shape == (2, 3)


def test_signature_and_name_of_a_call_stay():
    import inspect

    assert list(inspect.signature(Fails.__call__).parameters) == ["self", "x"]
    assert Fails.__call__.__qualname__ == "Fails.__call__"


def test_an_error_in_a_call_of_two_arguments_stays_that_error():
    with pytest.raises(TypeError, match="qry_proj|broadcast|width|last axis"):
        pax.MultiHeadAttention(1, 2)(jnp.ones((3, 3)), jnp.ones((3, 3)), jnp.ones((3, 3)))
