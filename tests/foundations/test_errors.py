"""Frames that a notebook leaves out of a traceback, counted without one; names that are near."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export._foundations.errors import near_names

PACKAGE = str(Path(pax.__file__).parent)
X = jnp.ones((2, 4))


class Block(pax.Module):
    def __init__(self):
        super().__init__()
        self.dropout = pax.Dropout(0.5)

    def __call__(self, x):
        raise ArithmeticError(f"of {self.dropout(x).shape}")


class Net(pax.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.layers = pax.Linear(4, 4), pax.Sequential(Block())

    def __call__(self, x):
        return self.layers(self.linear(x))


def loss_fn(net, x):
    net, y = net % x
    return y, (y, net)


def fails(x):
    raise ArithmeticError


CALLS = {
    "call": lambda net: net.eval()(X),
    "%": lambda net: net % X,
    "jit": lambda net: jax.jit(lambda net: net % X)(net),
    "pax's jit": lambda net: pax.transforms.jit(Net.__call__)(net, X),
    "grad": lambda net: pax.grad(loss_fn, has_aux=True)(net, X),
    "update": lambda net: pax.build_update_fn(loss_fn)(net, net.parameters(), X),
    "vmap of a function": lambda net: pax.transforms.vmap(fails)(X),
    "export": lambda net: pax.export.to_stablehlo(net, "none", pax.export.spec("2, 4")),
    "export of a function": lambda net: pax.export.to_stablehlo(
        ({"w": X}, lambda params, x: fails(x)), "none", pax.export.spec("2, 4")
    ),
}


@pytest.fixture
def filtering():
    """Sets jax's own setting, and sets it back."""
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


def frames(call, kind=Exception):
    """The frames of this package, outermost first, of the error of a call."""
    with pytest.raises(kind) as caught:
        call(Net())
    found = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    return [frame for frame in found if frame.f_code.co_filename.startswith(PACKAGE)]


def hidden(found):
    return [frame for frame in found if frame.f_locals.get("__tracebackhide__")]


@pytest.mark.parametrize("name", CALLS)
def test_in_a_notebook_no_frame_of_ours_is_shown(name, filtering, monkeypatch):
    filtering("auto")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    found = frames(CALLS[name], ArithmeticError)
    assert found and hidden(found) == found


def test_as_jaxs_setting_says(filtering):
    filtering("tracebackhide")
    found = frames(CALLS["%"])
    assert len(found) >= 6 and hidden(found) == found
    filtering("off")
    assert hidden(frames(CALLS["%"])) == []


@pytest.mark.parametrize("name", CALLS)
def test_elsewhere_few_are_shown(name, filtering):
    filtering("auto")
    assert len(frames(CALLS[name], ArithmeticError)) <= 5


def test_nested_layers_show_one_frame(filtering):
    filtering("auto")
    net = pax.Sequential(pax.Sequential(pax.Sequential(pax.Linear(4, 4), fails)))
    assert len(frames(lambda _: net(X), ArithmeticError)) == 1


def test_errors_of_ours_hide_what_leads_to_them(filtering):
    filtering("tracebackhide")
    found = frames(lambda net: net.linear(jnp.ones((2, 3))), pax.errors.PaxError)
    assert len(found) > 2 and hidden(found) == found


# --- which name a mistyped one may stand for: one rule, whoever asks ----------------------


@pytest.mark.parametrize(
    ("name", "names", "near"),
    [
        ("wieght", ["bias", "weight", "weights"], ["weight", "weights"]),
        ("modell", ["data", "model"], ["model"]),
        ("layer.0", ["encoder.layers.0", "encoder.norm"], ["encoder.layers.0"]),
        ("x", ["data", "model"], []),
        ("a", [], []),
        ("", ["a"], []),
        ("same", ["other", "same"], ["same"]),
    ],
)
def test_near_names(name, names, near):
    assert near_names(name, names, 2) == near
    assert near_names(name, names) == near[:1]


def test_of_equally_near_names_the_first_one_comes_first():
    assert near_names("conv3", ["conv1", "conv2"], 3) == ["conv1", "conv2"]


def test_it_is_the_only_place():
    using = {path.name for path in Path(PACKAGE).rglob("*.py") if "difflib" in path.read_text()}
    assert using == {"errors.py"}
