"""Functions of statistics, written out for formats that have none, beside jax's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from pax_export.errors import UnsupportedOperationError, ValidationError
from pax_export.export import load, spec, to_onnx, to_tflite
from pax_export.export.formats.special import FUNCTIONS, written_out
from pax_export.export.validation.validate import Case, compare_either
from tests.closeness import assert_close

OPERATIONS = {
    "bessel_i0e": special.i0e,
    "bessel_i1e": special.i1e,
    "igamma": lax.igamma,
    "igammac": lax.igammac,
    "regularized_incomplete_beta": lax.betainc,
    "zeta": lax.zeta,
    "polygamma": lax.polygamma,
    "erfc": lax.erfc,
    "atan2": lax.atan2,
}
SMALL = np.array([0.0, 1e-4, 0.3, 0.5, 1.0, 1.7, 3.7, 3.8, 8.0, 40.0, np.nan, -1.0], np.float32)
SHARES = np.array([0.0, 1e-3, 0.2, 0.5, 0.77, 0.999, 1.0, -0.1, 1.1, np.nan], np.float32)
WHOLE = np.array([0.0, 1.0, 2.0, 5.0], np.float32)


def calls(name):
    if name.startswith("bessel") or name == "erfc":
        return [np.concatenate([SMALL, -SMALL, [np.inf]]).astype(np.float32)]
    if name.startswith("regular"):
        return list(map(np.ravel, np.meshgrid(SMALL[2:], SMALL[2:], SHARES)))
    if name == "polygamma":
        return list(map(np.ravel, np.meshgrid(WHOLE, SMALL[1:11])))
    if name == "zeta":
        return list(map(np.ravel, np.meshgrid(np.float32([0.5, 1, 1.5, 2, 6, 20]), SMALL[:11])))
    return list(map(np.ravel, np.meshgrid(SMALL[1:], np.append(SMALL, np.float32(np.inf)))))


def test_there_is_one_for_each():
    assert OPERATIONS.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_those_of_jax(name):
    given = calls(name)
    found = jax.jit(written_out(name, given))(*given)
    expected = jax.jit(OPERATIONS[name])(*given)
    for place, (one, other) in enumerate(zip(np.asarray(found), np.asarray(expected))):
        where = f"{name}{[each[place] for each in given]}"
        assert_close(one, other, rtol=2e-4, atol=1e-6, where=where)


def test_none_is_as_exact_as_float64():
    assert written_out("zeta", [np.zeros(1), np.zeros(1)]) is None
    half = written_out("bessel_i0e", [jnp.ones(2, jnp.bfloat16)])(jnp.ones(2, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize(("write", "suffix"), [(to_onnx, ".onnx"), (to_tflite, ".tflite")])
def test_runtimes_run_them(write, suffix, tmp_path):
    def apply(_, x):
        return special.i0e(x), special.gammainc(x, x[::-1]), special.polygamma(1, x)

    x = np.float32([0.3, 1.2, 5.0])
    write(({}, apply), tmp_path / f"m{suffix}", spec("n"), examples=[x])
    for one, other in zip(load(tmp_path / f"m{suffix}")(x), apply({}, x)):
        assert_close(one, other, rtol=1e-4)


def test_what_is_not_exact_enough_is_refused(tmp_path):
    with jax.enable_x64(True), pytest.raises(UnsupportedOperationError, match="bessel_i0e"):
        to_onnx(({}, lambda _, x: special.i0e(x)), tmp_path / "m.onnx", spec("n", "float64"))


@pytest.mark.parametrize(("write", "suffix"), [(to_onnx, ".onnx"), (to_tflite, ".tflite")])
def test_what_is_no_matrix_has_no_parts(write, suffix, tmp_path):
    def apply(_, x):
        return *jnp.linalg.eigh(x), *jnp.linalg.svd(x)

    x = np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32)
    x[1, 2, 0], x[2, 2, 0] = np.nan, np.inf
    write(({}, apply), tmp_path / f"m{suffix}", spec("3, 3, 3"), validate=False)
    for each in load(tmp_path / f"m{suffix}")(x):
        assert np.isfinite(each[0]).all() and np.isnan(each[1:]).all()


def test_an_example_that_is_no_number_is_named_as_a_reason():
    case = Case("f", {"x": np.float32([1, np.inf])}, {"y": np.zeros(2, np.float32)})
    with pytest.raises(ValidationError) as caught:
        compare_either(case, {"y": np.ones(2, np.float32)})
    assert caught.value.write.startswith("an example without NaN and infinity: of these, decomp")
