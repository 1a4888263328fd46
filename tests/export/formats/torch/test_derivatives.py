"""Derivatives that torch has otherwise than jax: at ties, zeros, ends and NaN, and of solvers."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pax_export.export import as_torch, load, spec, to_torch
from tests.closeness import assert_close

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

X = np.array([[0, -0.0, 1, 1, 2, np.nan], [3, 1, 1, -2, -2, 0]], np.float32)
Y = np.array([[0, 0, 1, 2, 1, 2], [3, 0, 1, -2, 1, 0]], np.float32)
PLACES = np.array([0, 2, 2, 1, 2, 9], np.int32)
WINDOW = ((1, 3), (1, 1), "SAME")
ELEMENTWISE = {
    "abs": lambda x, y: jnp.abs(x),
    "relu": lambda x, y: jax.nn.relu(x),
    "relu6": lambda x, y: jax.nn.relu6(x),
    "clip": lambda x, y: jnp.clip(x, 0, 2),
    "clip to one": lambda x, y: jnp.clip(x, 1, 1),
    "clamp to numbers": lambda x, y: lax.clamp(0.0, x, 2.0),
    "maximum of a number": lambda x, y: jnp.maximum(1.0, x),
    "minimum of a number": lambda x, y: jnp.minimum(x, 1.0),
    "hard_swish": lambda x, y: jax.nn.hard_swish(x),
    "celu": lambda x, y: jax.nn.celu(x),
    "cbrt": lambda x, y: jnp.cbrt(y),
    "minimum": jnp.minimum,
    "maximum": jnp.maximum,
    "clamp": lambda x, y: lax.clamp(jnp.minimum(y, 1), x, jnp.maximum(y, 1)),
    "acosh": lambda x, y: jnp.arccosh(x - 0.5),
    "atan2": jnp.arctan2,
    "pow": lambda x, y: lax.pow(jnp.abs(y), jnp.abs(x)),
    "xlogy": lambda x, y: jax.scipy.special.xlogy(y, jnp.abs(x) + 1),
    "cummax": lambda x, y: lax.cummax(y, 1),
    "cummin": lambda x, y: lax.cummin(y, 1, reverse=True),
    "max pool": lambda x, y: lax.reduce_window(y, -jnp.inf, lax.max, *WINDOW),
    "min pool": lambda x, y: lax.reduce_window(y, jnp.inf, lax.min, *WINDOW),
    "set": lambda x, y: y.at[0, PLACES].set(x[1]),
    "max": lambda x, y: y.at[0, PLACES].max(x[1]),
    "sort": lambda x, y: jnp.sort(y, axis=1),
    "median": lambda x, y: jnp.median(y, axis=1),
}
MATRIX = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
MATRIX = MATRIX @ MATRIX.swapaxes(1, 2) + np.eye(4, dtype=np.float32)
MATRICES = {
    "cholesky": lambda a, b: lax.linalg.cholesky(a, symmetrize_input=False),
    "solve": jnp.linalg.solve,
    "solve positive": lambda a, b: jax.scipy.linalg.solve(a[0], b[0], assume_a="pos"),
    "det": lambda a, b: jnp.linalg.det(a),
    "expm": lambda a, b: jax.scipy.linalg.expm(a[0] * 0.1),
}


@pytest.mark.parametrize(
    ("functions", "x", "y"), [(ELEMENTWISE, X, Y), (MATRICES, MATRIX, MATRIX[:, :, :3] + 1)]
)
def test_derivatives_of_operations_are_those_of_jax(functions, x, y):
    import torch

    def model(_, x, y):
        return [function(x, y) for function in functions.values()]

    module = as_torch(({}, model), (spec(x.shape), spec(y.shape)), validate=False)
    given = [torch.from_numpy(each.copy()).requires_grad_() for each in (x, y)]
    random = np.random.default_rng(1)
    for (name, function), found in zip(functions.items(), module(*given)):
        expected, back = jax.vjp(function, x, y)
        slope = random.normal(size=found.shape).astype(np.float32)
        slopes = torch.autograd.grad(found, given, torch.from_numpy(slope), allow_unused=True)
        assert_close(found.detach().numpy(), expected, rtol=1e-5, atol=1e-5, where=name)
        for one, other, source in zip(slopes, back(slope), given):
            one = torch.zeros_like(source) if one is None else one
            assert_close(one.numpy(), other, rtol=1e-4, atol=1e-4, where=name)


def test_programs_have_the_slopes_of_clips(tmp_path):
    clips = [function for name, function in ELEMENTWISE.items() if "clip" in name or "relu" in name]

    def model(_, x):
        return [clip(x, x) for clip in clips]

    to_torch(({}, model), tmp_path / "m.pt2", spec("2, 6"), examples=[(X,)])


def test_a_slope_that_is_nan_stays():
    import torch

    x, slope = np.array([-1, 1, np.nan], np.float32), np.full(3, np.nan, np.float32)

    def clips(x):
        return jnp.clip(x, 0, 2), jax.nn.relu(x)

    given = torch.from_numpy(x.copy()).requires_grad_()
    made = as_torch(({}, lambda _, x: clips(x)), spec("n"), validate=False)(given)
    for place in range(2):
        (found,) = torch.autograd.grad(made[place], given, torch.from_numpy(slope))
        assert_close(found.numpy(), jax.vjp(lambda x, at=place: clips(x)[at], x)[1](slope)[0])


def test_programs_have_the_derivatives_of_solvers(tmp_path):
    def model(params, b):
        return jnp.linalg.solve(params["a"], b), lax.cummax(jnp.abs(b), 0)

    a = np.eye(3, dtype=np.float32) * 2 + 0.1
    to_torch(({"a": jnp.asarray(a)}, model), tmp_path / "m.pt2", spec("3"))
    assert_close(
        load(tmp_path / "m.pt2")(np.ones(3, np.float32))[0], np.linalg.solve(a, np.ones(3))
    )


def test_solvers_without_a_derivative_run():
    def model(_, a, b):
        return lax.custom_linear_solve(lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b))

    a, b = np.eye(3, dtype=np.float32) * 2 + 0.1, np.ones(3, np.float32)
    module = as_torch(({}, model), (spec("3, 3"), spec("3")), validate=False)
    import torch

    found = module(torch.from_numpy(a), torch.from_numpy(b))
    assert_close(found.detach().numpy(), np.linalg.solve(a, b), rtol=1e-5)


def test_numbers_that_are_trained_are_not_read():
    import torch

    def model(params, x):
        return jnp.minimum(x, params["limit"])

    module = as_torch(({"limit": jnp.float32(0.5)}, model), spec("n"), validate=False)
    module.limit.data.fill_(2.0)
    assert module(torch.full((1,), 3.0)).item() == 2.0
