"""Sizes that torch fixes or bounds are refused by name, whether or not the file is validated."""

import dataclasses

import jax.numpy as jnp
import pytest

from pax_export import errors
from pax_export.export import spec, to_torch
from pax_export.export.formats.torch import convert
from pax_export.export.formats.torch.values import RULES

torch = pytest.importorskip("torch")
assert convert  # which loads the rules


def less_than_a_hundred(x):
    return x if x.shape[0] < 100 else 2 * x


def of_equal_sizes(x):
    return x + torch.zeros(x.shape[2], x.shape[1], x.shape[0])


NARROW = {
    "fixed": (lambda x: x * int(x.shape[2]), "instead of time"),
    "pool": (lambda x: torch.max_pool1d(x, 1, 1), "instead of time"),
    "bounded": (less_than_a_hundred, 'constraints=["batch <= 99"]'),
    "multiple": (lambda x: x.reshape(7, -1), "Mod(5*batch*time, 7)"),
    "equal": (of_equal_sizes, "=="),
}


@pytest.mark.parametrize(
    ("name", "validate"), [*((name, False) for name in NARROW), ("bounded", True)]
)
def test_a_size_that_torch_does_not_keep_is_named(name, validate, tmp_path, monkeypatch):
    function, write = NARROW[name]
    rule = dataclasses.replace(RULES["sin"], function=lambda build, x, **_: build(function, x.node))
    monkeypatch.setitem(RULES, "sin", rule)
    with pytest.raises(errors.SymbolicDimensionError) as caught:
        to_torch(({}, lambda _, x: jnp.sin(x)), tmp_path / "net.pt2", spec("batch, 5, time"),
                 validate=validate)  # fmt: skip
    assert write in caught.value.write
    assert not (tmp_path / "net.pt2").exists()
