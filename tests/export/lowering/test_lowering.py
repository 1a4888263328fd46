"""Flat functions to portable modules: no TensorFlow here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import UnsupportedOperationError
from pax_export.export.artifact import saved_models
from pax_export.export.lowering.lower import lower_traced
from pax_export.export.tracing.traced import trace, vjp
from tests.refusals import refused

ALL = ("cpu", "cuda", "rocm", "tpu")
(BATCH,) = jax.export.symbolic_shape("batch")
X = jax.ShapeDtypeStruct((BATCH, 64), jnp.float32)
BIG = jnp.arange(4096.0).reshape(64, 64) / 4096  # not all the same: that would be one number
BIG_NUMPY = np.ones((64, 32), np.float32)


def lowered(function, *structs, platforms=ALL):
    return lower_traced(trace(function, structs or (X,)), platforms)


@jax.custom_vjp
def with_own_gradient(x):
    return x @ BIG


with_own_gradient.defvjp(lambda x: (x @ BIG, None), lambda _, g: (g @ BIG.T,))


@jax.jit
def in_jit(x):
    return x @ BIG


@jax.custom_vjp
def with_hidden_gradient(x):
    return in_jit(x)


with_hidden_gradient.defvjp(lambda x: (in_jit(x), None), lambda _, g: (g @ BIG.T,))

CLOSING = {
    "directly": (lambda v: [v[0] @ BIG + BIG.sum()], 1),
    "numpy": (lambda v: [v[0] @ BIG @ BIG_NUMPY], 2),
    "in jit": (lambda v: [jax.jit(lambda x: x @ BIG)(v[0])], 1),
    "in jit, in jit, twice": (lambda v: [jax.jit(jax.jit(lambda x: x @ BIG))(v[0]) @ BIG], 1),
    "in jit in a scan": (
        lambda v: [jax.lax.scan(lambda c, _: (in_jit(c), None), v[0], None, length=2)[0]],
        1,
    ),
    "in jit in a symbolic map": (lambda v: [jax.lax.map(in_jit, v[0])], 1),
    "in jit in while": (
        lambda v: [jax.lax.while_loop(lambda x: in_jit(x).sum() < 3, in_jit, v[0])],
        1,
    ),
    "in jit in branches": (
        lambda v: [jax.lax.switch(v[0].shape[1] % 3, [jnp.sin, in_jit, jnp.cos], v[0])],
        1,
    ),
    "in jit in cond": (lambda v: [jax.lax.cond(v[0].sum() > 0, in_jit, jnp.sin, v[0])], 1),
    "in jit in remat": (lambda v: [jax.checkpoint(in_jit)(v[0])], 1),
    "in jit in a custom gradient": (lambda v: [with_hidden_gradient(v[0])], 1),
    "in jit in a custom gradient in a loop": (
        lambda v: [jax.lax.fori_loop(0, 2, lambda i, x: with_hidden_gradient(x), v[0])],
        1,
    ),
    "in a loop": (lambda v: [jax.lax.fori_loop(0, 3, lambda i, x: x @ BIG, v[0])], 1),
    "in a branch": (lambda v: [jax.lax.cond(v[0].sum() > 0, lambda x: x @ BIG, jnp.sin, v[0])], 1),
    "in a custom gradient": (lambda v: [with_own_gradient(v[0])], 1),
}


@pytest.mark.parametrize(("function", "count"), CLOSING.values(), ids=CLOSING)
def test_closed_over_arrays_become_operands(function, count):
    module = lowered(function)
    assert len(module.constants) == count
    assert any(value is BIG for value in module.constants)
    assert len(module.portable.module) < BIG.nbytes  # of which no copy is left inside


def test_small_arrays_stay_in_the_graph():
    small = jnp.arange(4.0)
    assert lowered(lambda v: [v[0][:, :4] * small]).constants == ()


@pytest.mark.parametrize("kind", [name for name in CLOSING if "while" not in name])
def test_gradients_share_closed_over_arrays(kind):
    function, count = CLOSING[kind]
    module = lower_traced(vjp(trace(function, (X,)), (0,), (0,)), ALL)
    assert len(module.constants) <= count
    assert len(module.portable.module) < BIG.nbytes
    assert all(value is BIG or value is BIG_NUMPY for value in module.constants)


GELU = partial(jax.nn.gelu, approximate=False)
NEW_IN_STABLEHLO = {
    "top_k": lambda v: list(jax.lax.top_k(v[0], 3)),
    "erf": lambda v: [jax.lax.erf(v[0])],
    "asin": lambda v: [jnp.arcsin(v[0]), jnp.arccosh(v[0]), jnp.sinh(v[0])],
    "random": lambda v: [jax.random.truncated_normal(jax.random.key(0), 0, 1, (3,)) + v[0][0, 0]],
    "sort": lambda v: [jnp.sort(v[0]), jnp.argsort(v[0])],
    "scan": lambda v: list(jax.lax.scan(lambda c, x: (c + x, jnp.tanh(c)), v[0][0], v[0])),
    "conv": lambda v: [jnp.convolve(v[0][0], jnp.ones(3))],
    "cumsum": lambda v: [jnp.cumsum(v[0], axis=1), jax.nn.softmax(v[0])],
    "tan": lambda v: [jnp.tan(v[0])],
    "accuracy": lambda v: [jax.lax.tanh(v[0], accuracy=jax.lax.AccuracyMode.HIGHEST)],
    "gradient of erf": lambda v: [jax.grad(lambda x: jax.lax.erf(x).sum())(v[0])],
    "gradient of gelu": lambda v: [jax.vjp(GELU, v[0])[1](v[0])[0]],
    "partition": lambda v: [jnp.partition(v[0], 2)],
    "take_along_axis": lambda v: [jnp.take_along_axis(v[0], jnp.argsort(v[0]), 1)],
    "top_k under vmap": lambda v: jax.vmap(lambda x: jax.lax.top_k(x, 2))(v[0]),
    "median": lambda v: [jnp.median(v[0], axis=1)],
    "choice": lambda v: [jax.random.categorical(jax.random.key(0), v[0])],
    "interpolation": lambda v: [
        jax.vmap(lambda x: jnp.interp(x, jnp.arange(3.0), jnp.arange(3.0)))(v[0])
    ],
}


@pytest.mark.parametrize("function", NEW_IN_STABLEHLO.values(), ids=NEW_IN_STABLEHLO)
def test_modules_are_written_for_the_oldest_reader(function):
    module = lowered(function)
    assert module.portable.stablehlo == (0, 9, 0)
    assert b"StableHLO_v0.9.0" in module.portable.module
    assert not module.neutral


def oldest(module):
    return saved_models.format_version(module.oldest_tensorflow)


TOO_NEW_FOR_2_15 = {
    "int4": (lambda v: [v[0].astype(jnp.int4).astype(jnp.int8)], "2.18"),
    "algorithm of a product": (
        lambda v: [jnp.dot(v[0], BIG, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)],
        "2.19",
    ),
    "accuracy of a function": (
        lambda v: [jax.lax.tanh(v[0], accuracy=jax.lax.Tolerance(1e-5, 1e-5, 1))],
        "2.20",
    ),
}


@pytest.mark.parametrize(("function", "needed"), TOO_NEW_FOR_2_15.values(), ids=TOO_NEW_FOR_2_15)
def test_operations_without_an_older_form_need_a_newer_reader(function, needed):
    assert oldest(lowered(function)) == needed


SQUARE = jax.ShapeDtypeStruct((BATCH, 4, 4), jnp.float32)
OF_ONE = "cholesky eigh svd qr inv det pinv slogdet matrix_rank"
LINEAR_ALGEBRA = {name: getattr(jnp.linalg, name) for name in OF_ONE.split()} | {
    "solve": lambda x: jnp.linalg.solve(x, x),
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(x, x),
    "lstsq": lambda x: jnp.linalg.lstsq(x[0], x[0])[0],
    "expm": jax.scipy.linalg.expm,
    "lu": jax.lax.linalg.lu,
    "matrix_power": lambda x: jnp.linalg.matrix_power(x, -2),
    "cho_solve": lambda x: jax.scipy.linalg.cho_solve((x, True), x),
    "polar": jax.vmap(jax.scipy.linalg.polar),
    "norm": lambda x: jnp.linalg.norm(x, 2, axis=(1, 2)),
}


@pytest.mark.parametrize("function", LINEAR_ALGEBRA.values(), ids=LINEAR_ALGEBRA)
def test_linear_algebra_calls_no_library(function):
    module = lowered(lambda v: jax.tree_util.tree_leaves(function(v[0])), SQUARE)
    assert module.neutral
    assert module.platforms == ALL
    assert b"lapack" not in module.portable.module
    assert oldest(module) == "2.15"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jnp.linalg.eigvals(x), "eig"),
        (lambda x: jax.scipy.linalg.schur(x[0]), "schur"),
        (lambda x: jax.scipy.linalg.qr(x[0], pivoting=True), "geqp3"),
    ],
)
def test_what_only_lapack_can_do_is_refused_by_name(function, name):
    with refused(UnsupportedOperationError, name, "where: test_lowering.py:"):
        lowered(lambda v: jax.tree_util.tree_leaves(function(v[0])), SQUARE)


CALLBACKS = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x),
    "io_callback": lambda x: jax.experimental.io_callback(np.sin, x, x),
    "debug_print": lambda x: (jax.debug.print("{}", x), x)[1],
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, y: CALLBACKS["pure_callback"](y), x),
}


@pytest.mark.parametrize("function", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_are_refused_with_their_line(function):
    with refused(UnsupportedOperationError, "where: test_lowering.py:"):
        trace(lambda v: [function(v[0])], (jax.ShapeDtypeStruct((3,), jnp.float32),))


def test_checks_of_equinox_are_refused_with_the_way_to_leave_them_out():
    def raises(x):
        return x

    raises.__module__ = "equinox._errors"  # as the function of its error_if is

    def model(x):
        return jax.lax.cond(x.sum() > 1, lambda: jax.pure_callback(raises, x, x), lambda: x)

    names = ("equinox.error_if", "where: test_lowering.py:", "EQX_ON_ERROR=off")
    with refused(UnsupportedOperationError, *names, got="pure_callback"):
        trace(lambda v: [model(v[0])], (jax.ShapeDtypeStruct((3,), jnp.float32),))


def test_a_traced_function_runs_with_arrays_of_other_sizes():
    w = np.arange(400.0, dtype=np.float32).reshape(4, 100)
    traced = trace(lambda given: [given[0] @ w], [jax.ShapeDtypeStruct((2, 4), "float32")])
    assert len(traced.constants) == 1
    for size in (2, 3):
        np.testing.assert_array_equal(traced.run([jnp.ones((size, 4))])[0], [w.sum(0)] * size)
