"""Files whose weights are not those of the module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.weights import LoadReport
from tests.refusals import refused

OTHER = {
    "bias": jnp.zeros(3, jnp.float16),
    "more": {"x": jnp.zeros(1)},
    "weight": jnp.zeros((3, 2)),
    "zero": jnp.zeros(1),
}


class Target(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = jnp.ones((2, 3)), jnp.ones(3)
        self.gone, self.list = jnp.ones(()), [jnp.ones(1)]
        self.zero = jnp.ones(1)


@pytest.fixture
def path(tmp_path):
    pax.save_weights(OTHER, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def test_all_differences_are_in_one_error(path):
    with pytest.raises(ValueError) as caught:
        pax.load_weights(Target(), path)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == (
        "The weights of the file are not those of the module:\n"
        "  - missing from the file: gone\n"
        "  - missing from the file: list.0\n"
        "  - unknown to the module: more.x\n"
        "  - weight: float32[3,2] in the file, float32[2,3] in the module\n"
        "  - bias: float16[3] in the file, float32[3] in the module\n"
        f"  where: {path}\n"
        "  fix: the module that was saved, or load_weights(module, path, strict=False) "
        "to load matching leaves"
    )
    assert caught.value.report.missing == ("gone", "list.0")


def test_not_strict_loads_what_fits_and_reports_the_rest(path):
    target = Target()
    loaded, report = pax.load_weights(target, path, strict=False)
    assert loaded.zero[0] == 0 and loaded.weight is target.weight and loaded.gone is target.gone
    assert report == LoadReport(
        loaded=("zero",),
        missing=("gone", "list.0"),
        unexpected=("more.x",),
        mismatched={
            "weight": "float32[3,2] in the file, float32[2,3] in the module",
            "bias": "float16[3] in the file, float32[3] in the module",
        },
    )
    assert not report.complete
    assert str(report).splitlines()[:2] == ["1 loaded", "missing from the file: gone"]


def test_not_strict_returns_a_report_when_all_fits(path):
    loaded, report = pax.load_weights(OTHER, path, strict=False)
    assert report.complete and report.loaded == ("bias", "more.x", "weight", "zero")
    assert str(report) == "4 loaded"
    assert loaded["weight"].shape == (3, 2)


def test_keys_and_their_data_are_distinguished(tmp_path):
    pax.save_weights({"key": jax.random.key(0)}, tmp_path / "x")
    for other, kind in (
        (jax.random.PRNGKey(0), "uint32[2]"),
        (jax.random.key(0, impl="rbg"), "key<rbg>[]"),
    ):
        with refused(ValueError, "key<threefry2x32>[] in the file", f"{kind} in the module"):
            pax.load_weights({"key": other}, tmp_path / "x")


def test_other_targets_are_refused(path):
    with refused(TypeError, where="weight", got="float: 1.0"):
        pax.load_weights({"weight": 1.0}, path)


# --- what cannot be saved -------------------------------------------------------------


def test_names_must_differ(tmp_path):
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(2)}}
    with refused(ValueError, where="a.b"):
        pax.save_weights(tree, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with refused(ValueError, where="a.b"):
        pax.load_weights(tree, tmp_path / "x")
    dots = {"a.b": jnp.ones(1)}  # no other has this name
    pax.save_weights(dots, tmp_path / "x")
    assert (pax.load_weights(dots, tmp_path / "x")["a.b"] == 1).all()


@pytest.mark.parametrize("tree", [jnp.ones(1), {"__metadata__": jnp.ones(1)}])
def test_every_weight_needs_a_name(tree, tmp_path):
    with pytest.raises(ValueError):
        pax.save_weights(tree, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_values_must_be_here(tmp_path):
    path = tmp_path / "x"
    donated = jnp.ones(3)
    donated.delete()
    shape = jax.ShapeDtypeStruct((2,), "float32")
    with refused(TypeError, where="x"):
        jax.jit(lambda x: pax.save_weights({"x": x}, path))(1.0)
    for value, got in (
        (donated, "an array that was deleted"), (shape, "ShapeDtypeStruct"), (1.5, "float: 1.5"),
    ):  # fmt: skip
        with refused(TypeError, f"got: {got}", where="x"):
            pax.save_weights({"x": value}, path)
    assert not path.exists()


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.array([{}]), np.zeros(1, "M8[s]"), np.zeros(1, "f4,i4")]
)
def test_other_values_are_refused(array, tmp_path):
    with refused(TypeError, where="x"):
        pax.save_weights({"x": array}, tmp_path / "x")
