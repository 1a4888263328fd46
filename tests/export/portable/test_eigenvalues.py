"""Eigenvalues and singular values in one model, without LAPACK."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from pax_export.errors import ValidationError
from pax_export.export import load, spec, to_saved_model
from pax_export.export.portable.decompositions import DECOMPOSITIONS
from pax_export.export.portable.for_xla import without_libraries
from tests.closeness import assert_close


def matrices(count, size=3, kind=np.float32):
    return np.random.default_rng(7).normal(size=(count, size, size)).astype(kind)


def symmetric(x):
    return (x + np.swapaxes(x, -1, -2)) / 2


def company(params, x):
    return {
        "singular": jnp.linalg.svd(x)[1],
        "lower": jnp.linalg.eigh(x, UPLO="L", symmetrize_input=False)[0],
        "upper": jnp.linalg.eigh(x, UPLO="U", symmetrize_input=False)[0],
        "root": jax.vmap(lambda a: jax.scipy.linalg.polar(a)[1])(x),
    }


def test_eigenvalues_are_in_order_beside_singular_values(tmp_path):
    report = to_saved_model(({}, company), tmp_path / "m", spec("n, 3, 3"), validate=False)
    x = matrices(500)
    found = load(tmp_path / "m")(x)
    below, above = np.tril(x), np.triu(x)
    assert_close(
        found["lower"], np.linalg.eigvalsh(below + np.tril(x, -1).mT), rtol=1e-4, atol=1e-5
    )
    assert_close(found["upper"], np.linalg.eigvalsh(above, UPLO="U"), rtol=1e-4, atol=1e-5)
    assert_close(found["singular"], np.linalg.svd(x)[1], rtol=1e-4, atol=1e-5)
    assert_close(found["root"] @ found["root"], x.mT @ x, rtol=1e-3, atol=1e-4)
    assert report.oldest_tensorflow == "2.15"


def without_lapack(function, x):
    return jax.jit(jaxpr_as_fun(without_libraries(jax.make_jaxpr(function)(x))))(x)


def test_the_other_triangle_of_complex_matrices_is_conjugated():
    def both(x):
        return [jnp.linalg.eigh(x, UPLO=each, symmetrize_input=False)[0] for each in "LU"]

    x = (matrices(20) + 1j * matrices(20)[::-1]).astype(np.complex64)
    for triangle, found in zip("LU", without_lapack(both, x)):
        assert_close(found, np.linalg.eigvalsh(x, UPLO=triangle), rtol=1e-4, atol=1e-4)


def test_gradients_of_eigenvalues_beside_singular_values(tmp_path):
    def model(params, x):
        x = params["scale"] * x
        return jnp.linalg.eigh(x)[0] * jnp.arange(3.0) + jnp.linalg.svd(x)[1]

    scale = {"scale": np.float32(1.5)}
    examples = [symmetric(matrices(4))]
    to_saved_model(
        (scale, model), tmp_path / "m", spec("n, 3, 3"), trainable=True, examples=examples
    )


def test_eigenvalues_of_wide_numbers():
    with jax.enable_x64(True):
        x = symmetric(matrices(6, 6, np.float64))
        values, vectors = map(np.asarray, without_lapack(jnp.linalg.eigh, x))
    assert_close(values, np.linalg.eigvalsh(x), rtol=1e-11, atol=1e-11)
    assert_close(x @ vectors, vectors * values[:, None, :], rtol=1e-6, atol=1e-6)


def unsorted(vectors, values):
    return vectors[..., ::-1], values[..., ::-1]


def of_another_matrix(vectors, values):
    return vectors, values + 0.01


@pytest.mark.parametrize("change", [unsorted, of_another_matrix])
def test_a_test_finds_eigenvalues_that_are_wrong(tmp_path, monkeypatch, change):
    """What the lowering says is not taken for the truth: jax's CPU, with LAPACK, is."""
    right = DECOMPOSITIONS["eigh"]
    monkeypatch.setitem(DECOMPOSITIONS, "eigh", lambda a, **given: change(*right(a, **given)))
    with pytest.raises(ValidationError, match="differs from the model's"):
        to_saved_model(
            ({}, lambda p, x: jnp.linalg.eigh(x, symmetrize_input=False)[0]),
            tmp_path / "m",
            spec("n, 4, 4"),
            operations="xla",
        )


def test_what_has_several_answers_is_judged_by_what_it_is(tmp_path):
    """Repeated values, no full rank, and equal pivots: any vectors of the kind are right."""

    def model(params, x):
        values, vectors = jnp.linalg.eigh(x)
        q, r = jnp.linalg.qr(x)
        return values, vectors, jnp.linalg.svd(x)[1], q, r, jax.lax.linalg.lu(x)[0]

    examples = [
        np.stack([np.eye(3), np.diag([2, 2, -1]), np.full((3, 3), 2) - np.eye(3)]).astype("f")
    ]
    shape = spec("n, 3, 3")  # without gradients, which jax has none of where values repeat
    to_saved_model(({}, model), tmp_path / "m", shape, examples=examples, vjp_order=0)


def test_what_has_no_decomposition_gives_nan_and_leaves_its_neighbours_alone(tmp_path):
    def model(params, x):
        lower, upper = (jnp.linalg.eigh(x, each, symmetrize_input=False)[0] for each in "LU")
        factor = jax.lax.linalg.cholesky(x, symmetrize_input=False)
        singular = jnp.linalg.svd(x)[1]
        return {"lower": lower, "upper": upper, "factor": factor, "singular": singular}

    x = np.tile(symmetric(matrices(1, 2)) + 5 * np.eye(2, dtype="f"), (7, 1, 1))
    x[1, 0, 0], x[2, 1, 0], x[3, 0, 1] = np.inf, -np.inf, np.nan
    x[4] = 1  # of rank one: one of its pivots is zero
    x[5], x[6] = 0, np.nan
    to_saved_model(({}, model), tmp_path / "m", spec("n, 2, 2"), validate=False)
    found = load(tmp_path / "m")(x)
    expected = jax.jit(model)({}, x)
    for name in ("lower", "upper"):
        assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, where=name)
    assert [np.isnan(each).any() for each in found["lower"]] == [0, 1, 1, 0, 0, 0, 1]
    assert [np.isnan(each).any() for each in found["upper"]] == [0, 1, 0, 1, 0, 0, 1]
    assert np.isnan(found["singular"][6]).all() and np.isnan(np.diagonal(found["factor"][6])).all()
    numbers = np.array([0, 4, 5])  # of what is infinite LAPACK gives a part
    assert_close(found["factor"][numbers], expected["factor"][numbers], rtol=1e-5, atol=1e-5)
    assert [np.isnan(each).any() for each in found["factor"][numbers]] == [0, 1, 1]
