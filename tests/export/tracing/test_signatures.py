"""What a method may take and give, and how a loaded model is called then."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random


class Pair(NamedTuple):
    mean: Any
    rest: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    inside: Any
    label: str = dataclasses.field(default="", metadata={"static": True})


def test_outputs_of_every_kind(export):
    weight = jnp.asarray(random(3))

    def model(params, x, flag):
        y = x * params
        return {
            "pair": Pair(y.mean(), [y, y]),  # a scalar; one array twice
            "same": x,  # an input
            "weight": params,  # a weight
            "none": None,
            "flag": flag,
            "number": 3,
            "box": Box({"y": y}),
        }

    loaded, report = export(
        (weight, model), (spec("n, 3"), spec("", "bool")), validate=True, trainable=True
    )
    x = random(2, 3)
    result = loaded(x, True)
    assert_close(result["pair"]["rest"][1], x * weight, atol=1e-6)
    assert_close(result["pair"]["mean"], (x * weight).mean(), atol=1e-6)
    np.testing.assert_array_equal(result["same"], x)
    np.testing.assert_array_equal(result["weight"], weight)
    assert_close(result["box"]["inside"]["y"], x * weight, atol=1e-6)
    assert result["none"] is None
    assert (bool(result["flag"]), int(result["number"])) == (True, 3)
    assert [entry.name for entry in report.signatures["serving_default"].outputs] == [
        "box.inside.y", "flag", "number", "pair.mean", "pair.rest.0", "pair.rest.1", "same",
        "weight",
    ]  # fmt: skip


def test_a_method_without_inputs_and_a_bare_scalar(export):
    params = {"w": jnp.ones(3)}
    loaded, report = export(
        (params, lambda p: p["w"].sum()), {"total": (), "one": spec("")},
        methods={"total": lambda p: p["w"].sum(), "one": lambda p, x: x},
        validate=True,
    )  # fmt: skip
    assert float(loaded.signatures["total"]()) == 3.0
    assert float(loaded.signatures["one"](2.0)) == 2.0
    assert report.signatures["total"].inputs == ()


def test_state_of_several_methods_with_a_typed_key(export):
    class Dice(pax.Module):
        def __init__(self):
            super().__init__()
            self.key = jax.random.key(3)
            self.thrown = jnp.zeros((), jnp.int32)

        def __call__(self, x):
            self.key, used = jax.random.split(self.key)
            self.thrown = self.thrown + 1
            return x + jax.random.uniform(used, x.shape)

        def count(self):
            return self.thrown

    model = Dice()
    loaded, report = export(
        model, {"throw": spec("n"), "count": ()}, state="update", validate=True,
        methods={"throw": "__call__", "count": "count"},
    )  # fmt: skip
    assert report.signatures["throw"].assigns == ("key", "thrown")
    assert report.signatures["count"].assigns == ()
    for number in (1, 2, 3):
        model, expected = pax.purecall(model, jnp.zeros(2))
        assert_close(loaded.signatures["throw"](np.zeros(2)), expected, atol=1e-6)
        assert int(loaded.signatures["count"]()) == number


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_64_bit_on_purpose(export, dtype):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        params = {"w": jnp.arange(3).astype(dtype)}
        loaded, report = export(
            (params, lambda p, x: x + p["w"]), spec("n, 3", dtype), validate=True
        )
        value = np.full((1, 3), 2**40 + 5).astype(dtype)
        np.testing.assert_array_equal(loaded(value), value + np.arange(3).astype(dtype))
    assert report.variables[0].dtype == dtype


@pytest.mark.parametrize("write", [to_saved_model, to_stablehlo])
def test_weights_and_inputs_may_be_big_endian(tmp_path, write):
    params = {name: value.astype(">f4") for name, value in affine_params().items()}
    write((params, affine), tmp_path / "model", spec("n, 3"))
    x = random(2, 3)
    expected = affine(affine_params(), x)
    model = load(tmp_path / "model")
    assert_close(model(x), expected)
    assert_close(model(x.astype(">f4")), expected)
