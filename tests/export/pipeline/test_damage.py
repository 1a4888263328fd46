"""Every way in which an export may differ from its model is found before it stands there."""

import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import ValidationError
from pax_export.export import spec, to_saved_model
from pax_export.export.formats.saved_model import writer as saved_model
from pax_export.export.pipeline import run_export


class Counter(pax.Module):
    """Counts by a step; what it returns does not tell."""

    def __init__(self, step):
        super().__init__()
        self.step, self.count = step, jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.count = self.count + self.step
        return 2 * x


def with_gradient(factor):
    @jax.custom_vjp
    def scale(params, x):
        return params * x

    def forward(params, x):
        return params * x, (params, x)

    def backward(kept, g):
        params, x = kept
        return (factor * g * x).sum(), g * params

    scale.defvjp(forward, backward)
    return np.ones((), np.float32), scale


def of(function):
    return np.ones((), np.float32), lambda params, x: function(x * params)


@dataclass(frozen=True)
class Damage:
    right: Any
    wrong: Any
    where: str = "output"
    options: tuple = ()


DAMAGES = {
    "a wrong integer": Damage(
        of(lambda x: jnp.argsort(x)), of(lambda x: jnp.argsort(x).at[0, 0].add(1))
    ),
    "a large wrong integer": Damage(
        of(lambda x: (x > 0).astype(jnp.uint32) + jnp.uint32(2**31)),
        of(lambda x: (x > 0).astype(jnp.uint32) + jnp.uint32(2**31 + 1)),
    ),
    "a wrong truth": Damage(of(lambda x: x > 0), of(lambda x: x >= jnp.min(x))),
    "a shape that broadcasts": Damage(
        of(lambda x: jnp.broadcast_to(x[:, :1], x.shape)), of(lambda x: x[:, :1])
    ),
    "a complex part": Damage(
        of(lambda x: jax.lax.complex(x, x)), of(lambda x: jax.lax.complex(x, 1.01 * x))
    ),
    "a number that is none": Damage(of(lambda x: x), of(lambda x: x.at[0, 0].set(jnp.nan))),
    "a number where none is": Damage(
        of(lambda x: jnp.full_like(x, jnp.nan)),
        of(lambda x: jnp.full_like(x, jnp.nan).at[0].set(0)),
    ),
    "a small part of a number": Damage(of(lambda x: x), of(lambda x: x.at[0, 0].mul(1.001))),
    "the sign of an infinity": Damage(
        of(lambda x: x.at[0, 0].set(jnp.inf)), of(lambda x: x.at[0, 0].set(-jnp.inf))
    ),
    "an infinity": Damage(of(lambda x: x), of(lambda x: x.at[0, 0].set(jnp.inf))),
    "another dtype": Damage(of(lambda x: x), of(lambda x: x.astype(jnp.float16))),
    "another sign of integers": Damage(
        of(lambda x: jnp.argsort(x)), of(lambda x: jnp.argsort(x).astype(jnp.uint32))
    ),
    "a half number": Damage(
        of(lambda x: x.astype(jnp.bfloat16)), of(lambda x: (1.1 * x).astype(jnp.bfloat16))
    ),
    "another name": Damage(of(lambda x: {"y": x}), of(lambda x: {"z": x}), "serving_default"),
    "a wrong new state": Damage(
        Counter(1), Counter(2), where="variable:count", options=(("state", "update"),)
    ),
    "no new state": Damage(Counter(1), Counter(0), "serving_default", (("state", "update"),)),
    "a wrong gradient": Damage(
        with_gradient(1),
        with_gradient(1.01),
        where="gradient:",
        options=(("trainable", True), ("vjp_order", 1)),
    ),
}


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """Which operation is to blame, test_parting asks; each step of that search is an export."""
    monkeypatch.setattr(run_export, "first_divergences", lambda *_: [None])


def write_instead(model, folder, monkeypatch, **options):
    to_saved_model(model, folder / "wrong", spec("n, 3"), validate=False, **options)

    def write(directory, *_):
        shutil.copytree(folder / "wrong", directory, dirs_exist_ok=True)

    monkeypatch.setattr(saved_model, "write", write)


def refused(damage, folder, monkeypatch, how):
    # Without gradients, which other shapes would break before anything is compared.
    options = {"vjp_order": 0, **dict(damage.options)}
    write_instead(damage.wrong, folder, monkeypatch, **options)
    with pytest.raises(ValidationError) as caught:
        to_saved_model(damage.right, folder / "right", spec("n, 3"), validate=how, **options)
    assert [each.name for each in folder.iterdir()] == ["wrong"]
    return caught.value


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found(kind, tmp_path, monkeypatch):
    error = refused(DAMAGES[kind], tmp_path, monkeypatch, True)
    assert DAMAGES[kind].where in error.where
    assert kind != "a small part of a number" or error.got.startswith("1 of ")


@pytest.mark.parametrize("kind", ["a complex part", "a wrong new state"])
def test_damage_is_found_in_a_fresh_process(kind, tmp_path, monkeypatch):
    error = refused(DAMAGES[kind], tmp_path, monkeypatch, "process")
    assert DAMAGES[kind].where in error.where


def test_a_wrong_result_is_named_even_if_it_cannot_be_differentiated(tmp_path, monkeypatch):
    damage = DAMAGES["a shape that broadcasts"]
    gradients = dataclasses.replace(damage, options=(("vjp_order", 1),))
    error = refused(gradients, tmp_path, monkeypatch, True)
    assert error.where.split()[-1] == damage.where


def test_a_missing_gradient_is_told_from_a_model_that_cannot_be_called(tmp_path, monkeypatch):
    model = of(lambda x: 2 * x)
    write_instead(model, tmp_path, monkeypatch, vjp_order=0)
    with pytest.raises(ValidationError) as caught:
        to_saved_model(model, tmp_path / "right", spec("n, 3"), vjp_order=1)
    assert "this export holds no gradients" in caught.value.got
    # Nobody asked for this one, so the export is written without it, and says so.
    report = to_saved_model(model, tmp_path / "plain", spec("n, 3"))
    assert "gradient" in report.signatures["serving_default"].no_gradient
