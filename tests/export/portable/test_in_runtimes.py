"""Decompositions in the runtimes whose formats lack the primitive."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.scipy import special

from pax_export.errors import UnsupportedOperationError, ValidationError
from pax_export.export import (
    load,
    spec,
    symbolic_numpy,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
)
from pax_export.export.validation.validate import Case, compare_either
from tests.closeness import assert_close

WRITERS = pytest.mark.parametrize(("write", "suffix"), [(to_onnx, ".onnx"), (to_tflite, ".tflite")])
#: Functions of an array of 6 rows of 4, which also read arrays without elements.
OF_NONE = {
    "sum": lambda x: x[:0].sum() + x,
    "product": lambda x: x[:, :0].prod(1) + x[:, 0],
    "largest": lambda x: lax.reduce_max(x[:0], (0,)) + x,
    "smallest": lambda x: lax.reduce_min(x[:0], (0,)) + x,
    "matrices": lambda x: (x[:, :0] @ x[:0])[:, :1] + x,
    "padded": lambda x: jnp.pad(x[:0], ((6, 0), (0, 0)), constant_values=3) + x[:1],
    "concatenated": lambda x: jnp.concatenate([x[:0], x, x[2:2]]),
    "window_replaced": lambda x: lax.dynamic_update_slice(x, x[:0, :2] * 0, (1, 1)),
    "rows_replaced": lambda x: x.at[jnp.zeros(0, int)].set(7.0),
    "rows_added": lambda x: x.at[jnp.zeros(0, int)].add(x[:0]),
}


def check(write, function, path, inputs, *shapes):
    """The file of a function gives what the function does, for an array of each shape."""
    write(function, path, inputs, validate=False)
    served = load(path)
    for seed, shape in enumerate(shapes):
        x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        found, expected = served(x), function(jnp.asarray(x))
        for name, value in expected.items():
            assert_close(found[name], value, rtol=1e-6, where=name)


@WRITERS
@pytest.mark.parametrize("shape", ["6, 4", "n, 4"])
def test_arrays_without_elements(write, suffix, shape, tmp_path):
    def run(x):
        return {name: function(x) for name, function in OF_NONE.items()}

    check(write, run, tmp_path / f"m{suffix}", spec(shape), (6, 4))


@WRITERS
@pytest.mark.parametrize("factor", [1, 4])
def test_transforms_of_fewer_or_more_frequencies(write, suffix, factor, tmp_path):
    def apply(_, x):
        return symbolic_numpy.irfft(x * (1 + 2j), factor * x.shape[1])

    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    write(({}, apply), tmp_path / f"m{suffix}", spec("n, m"), validate=False)
    assert_close(load(tmp_path / f"m{suffix}")(x), apply({}, x), rtol=1e-4)


@WRITERS
@pytest.mark.parametrize("padded", [0, 1])
def test_padding_of_symbolic_images_is_that_of_operators(write, suffix, padded, tmp_path):
    kernel = np.random.default_rng(1).normal(size=(3, 2, 3, 4)).astype(np.float32)

    def apply(_, x):
        x = jnp.pad(x, ((0, 0), (padded, 0), (0, 0), (0, 0)))
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 3, 2, 1), "SAME")

    write(({}, apply), tmp_path / f"m{suffix}", spec("n, h, w, 3"), validate=False)
    loaded = load(tmp_path / f"m{suffix}")
    for height, width in ((8, 8), (9, 6), (1, 5)):
        x = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)
        assert_close(loaded(x), apply({}, x), rtol=1e-5)
    content = (tmp_path / f"m{suffix}").read_bytes()
    assert (b"Mod" if suffix == ".onnx" else b"floor_") not in content  # no arithmetic of sizes


@WRITERS
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_product_that_overflows_is_not_undone(write, suffix, dtype, tmp_path):
    x = np.array([2**30, -5, 7] if dtype == "int32" else [3e38, -5, 7], dtype)

    def apply(_, x):
        return lax.div(lax.mul(x, np.asarray(3, dtype)), np.asarray(3, dtype))

    write(({}, apply), tmp_path / f"m{suffix}", spec("n", dtype), validate=False)
    np.testing.assert_array_equal(load(tmp_path / f"m{suffix}")(x), apply({}, x))


@WRITERS
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


def test_an_example_that_is_no_number_is_named_as_a_reason():
    case = Case("f", {"x": np.float32([1, np.inf])}, {"y": np.zeros(2, np.float32)})
    with pytest.raises(ValidationError) as caught:
        compare_either(case, {"y": np.ones(2, np.float32)})
    assert caught.value.write.startswith("an example without NaN and infinity: of these, decomp")


ENTRIES = np.where(np.random.default_rng(3).random((6, 6)) < 0.4, 1.5, 0).astype(np.float32)


def sparse_products(x):
    with jax.ensure_compile_time_eval():
        matrix, rows = sparse.BCOO.fromdense(ENTRIES), sparse.BCSR.fromdense(ENTRIES)
    weighted = jax.vmap(lambda w, h: sparse.BCOO((w, matrix.indices), shape=(6, 6)) @ h)
    return {
        "shared": jax.vmap(lambda h: matrix @ h)(x),
        "rows": jax.vmap(lambda h: rows @ h)(x),
        "right": x[:, :, 0] @ matrix.T,
        "square": (matrix @ matrix).todense() @ x[0],
        "each": weighted(jnp.tile(x[:, 0, :1], (1, matrix.nse)), x),
    }


@pytest.mark.parametrize("write", [to_onnx, to_tflite, to_saved_model, to_stablehlo])
def test_sparse_matrices(write, tmp_path):
    check(write, sparse_products, tmp_path / "m", spec("batch, 6, 4"), (1, 6, 4), (3, 6, 4))


def numbers_of_numpy(x):
    one, two = np.int64(1), np.int64(2)
    sides = (one, two, two, one)
    return {
        "largest": lax.reduce_window(x, -np.inf, lax.max, sides, (one,) * 4, "VALID"),
        "sums": lax.reduce_window(x, 0.0, lax.add, sides, (one,) * 4, "SAME"),
        "power": lax.integer_pow(x, np.int64(3)),
        "in_a_loop": lax.map(lambda row: lax.integer_pow(row, two), x),
    }


@pytest.mark.parametrize("write", [to_onnx, to_tflite, to_saved_model])
def test_parameters_that_are_integers_of_numpy(write, tmp_path):
    check(write, numbers_of_numpy, tmp_path / "m", spec("2, 6, 5, 3"), (2, 6, 5, 3))
