"""Decompositions by the rules for all platforms are those of the matrix, whatever matrix it is.

Of full rank and of none, with equal rows, values that repeat, badly conditioned, large, small,
and one with NaN among them: none of its neighbours may be the worse for it.  Vectors may have
either sign and repeated values any, so factors are judged by what they are: unitary, in order, and
the matrix when multiplied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.export import load, spec, to_saved_model
from tests.closeness import assert_close
from tests.hard.size import IN_LONG_RUNS

if not IN_LONG_RUNS:
    pytest.skip("the sweep of decompositions is part of tox -e hard", allow_module_level=True)
pytest.importorskip("tensorflow")


def matrices(rows: int, columns: int, kind: str) -> dict[str, np.ndarray]:
    """Matrices that decompositions trip over."""
    random = np.random.default_rng(rows * 10 + columns)
    plain = random.normal(size=(rows, columns))
    left, values, right = np.linalg.svd(plain, full_matrices=False)
    twins, nan = plain.copy(), plain.copy()
    if plain.size:
        twins[-1], nan[-1, -1] = twins[0], np.nan
        twins[:, -1] = twins[:, 0]
    made = {
        "plain": plain,
        "zero": 0 * plain,
        "of rank one": np.ones_like(plain),
        "with twins": twins,
        "badly conditioned": (left * 10.0 ** -np.linspace(0, 5, len(values))) @ right,
        "of equal values": left @ right,
        "nan": nan,
        "large": plain * 1e10,
        "small": plain * 1e-10,
        "identity": np.eye(rows, columns),
    }
    if kind.startswith("complex"):
        turned = np.exp(1j * random.normal(size=(rows, 1)) + 1j * random.normal(size=(1, columns)))
        made = {name: matrix * turned for name, matrix in made.items()}
    return {name: matrix.astype(kind) for name, matrix in made.items()}


def adjoint(matrix):
    return matrix.conj().mT


def decompositions(_, x):
    square = x @ adjoint(x)
    values, vectors = jnp.linalg.eigh(square)
    lu, _, order = jax.lax.linalg.lu(x)
    return {
        "singular values": jnp.linalg.svd(x, compute_uv=False),
        "thin svd": tuple(jnp.linalg.svd(x, full_matrices=False)),
        "full svd": tuple(jnp.linalg.svd(x)),
        "thin qr": tuple(jnp.linalg.qr(x)),
        "full qr": tuple(jnp.linalg.qr(x, mode="complete")),
        "lu": (lu, order),
        "eigh": (values, vectors),
        "eigenvalues": jnp.linalg.eigvalsh(square),
    }


def check(found, matrix: np.ndarray, where: str) -> None:
    """Every factor is one of its kind, and together they are the matrix."""
    wide = matrix.astype(np.complex128 if matrix.dtype.kind == "c" else np.float64)
    singular = np.linalg.svd(wide, compute_uv=False)
    size = max(float(np.abs(matrix).max(initial=0)) * max(matrix.shape), 1e-30)
    apart = 200 * max(float(np.finfo(matrix.dtype).eps), 1e-8)

    def same(one, other, scale=size, name=""):
        one, other = (np.asarray(each, wide.dtype) / scale for each in (one, other))
        assert_close(one, other, rtol=0, atol=apart, where=f"{name} of {where}")

    def unitary(columns, name):
        same(adjoint(columns) @ columns, np.eye(columns.shape[1]), 1.0, f"unitary {name}")

    same(found["singular values"], singular, name="singular values")
    for name in ("thin svd", "full svd"):
        left, values, right = found[name]
        count = len(values)
        same((left[:, :count] * values) @ right[:count], matrix, name=name)
        same(values, singular, name=name)
        unitary(left, name)
        unitary(adjoint(right), name)
    for name in ("thin qr", "full qr"):
        same(found[name][0] @ found[name][1], matrix, name=name)
        unitary(found[name][0], name)
    lu, order = found["lu"]
    rows, count = matrix.shape[0], len(singular)
    lower = np.tril(lu[:, :count], -1) + np.eye(rows, count)
    same(lower @ np.triu(lu)[:count], matrix[order], name="lu")
    values, vectors = found["eigh"]
    square = wide @ adjoint(wide)
    same((vectors * values) @ adjoint(vectors), square, size**2, "eigh")
    unitary(vectors, "eigh")
    assert (np.diff(values) >= 0).all(), where
    assert (np.diff(found["eigenvalues"]) >= 0).all(), where
    same(found["eigenvalues"], np.linalg.eigvalsh(square), size**2, "eigenvalues")


def check_nan(found, where: str) -> None:
    for name in ("thin svd", "full svd", "eigh", "singular values", "eigenvalues"):
        values = jax.tree.leaves(found[name])
        assert all(np.isnan(each).all() for each in values[:1]), f"{name} of {where}"


@pytest.mark.parametrize("kind", ["float32", "complex64", "float64"])
@pytest.mark.parametrize("shape", ["1, 1", "2, 5", "3, 3", "5, 2", "7, 7", "0, 3", "3, 0", "0, 0"])
def test_they_are_of_the_matrix(shape, kind, tmp_path):
    rows, columns = map(int, shape.split(","))
    tried = matrices(rows, columns, kind)
    x = np.stack(list(tried.values()))
    with jax.enable_x64(kind == "float64"):
        inputs = spec(f"{'n' if x.size else len(x)}, {shape}", kind)
        model = ({}, decompositions)
        options = {"validate": False, "vjp_order": 0, "trainable": False}
        to_saved_model(model, tmp_path / "m", inputs, **options)
    found = load(tmp_path / "m")(x)
    for number, (name, matrix) in enumerate(tried.items()):
        own = jax.tree.map(lambda each, number=number: np.asarray(each[number]), found)
        if np.isfinite(matrix).all():
            check(own, matrix, name)
        else:
            check_nan(own, name)
