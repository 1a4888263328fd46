"""Decompositions of primitives, in jax alone beside jax's own, on hostile numbers too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.lax import linalg

import pax_export as pax
from pax_export import errors
from pax_export._foundations.jaxpr import (
    inner_programs,
    jaxpr_primitives,
    needed_equations,
    walk_equations,
)
from pax_export.export import spec, to_onnx
from pax_export.export.portable import decompose, kept, not_decomposed
from pax_export.export.portable.decompositions import DECOMPOSITIONS
from pax_export.export.portable.decompositions.eigenvalues import eigh
from pax_export.export.portable.decompositions.reductions import select_and_scatter_add
from pax_export.export.portable.passes import flattened
from pax_export.precision import quantized
from tests.closeness import assert_close

_POSITIVE = [0, 1e-30, 1e-8, 1e-4, 0.1, 0.3, 0.5, 0.7, 0.99, 1, 1.5, 2, 2.5, 3, 5, 7.5, 9.3, 10.5]
_POSITIVE += [20, 50, 88.5, 89, 100, 1e3, 1e6, 1e9, 1e15, 1e30, 3e38, np.inf, np.nan]
HOSTILE = np.array([*_POSITIVE, *(-each for each in _POSITIVE)], np.float32)
PAIRS = tuple(np.ravel(each) for each in np.meshgrid(HOSTILE, HOSTILE))
SMALL = np.array([0.0, 1e-4, 0.3, 0.5, 1.0, 1.7, 3.7, 3.8, 8.0, 40.0, np.nan, -1.0], np.float32)
LIMITS = np.append(SMALL[2:], np.float32([0, np.inf]))
SHARES = np.array([0.0, 1e-3, 0.2, 0.5, 0.77, 0.999, 1.0, -0.1, 1.1, np.nan], np.float32)
RANDOM = np.random.default_rng(0)
SQUARE = RANDOM.normal(size=(2, 6, 6)).astype(np.float32)
COMPLEX = np.exp(1j * RANDOM.normal(size=(2, 6, 6))).astype(np.complex64)
POSITIVE = SQUARE @ SQUARE.transpose(0, 2, 1) + np.eye(6, dtype=np.float32)
ROWS = RANDOM.normal(size=(3, 17, 4)).astype(np.float32)
IMAGES = RANDOM.normal(size=(2, 13, 9, 3)).astype(np.float32)


def operation_names(program):
    """The names of the operations of a program; a kept function counts as one."""
    names = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        name, _ = kept.operation(equation)
        names.add(name)
        if name == equation.primitive.name:
            names.update(*map(operation_names, inner_programs(equation)))
    return names


def grid(*axes):
    return tuple(np.ravel(each) for each in np.meshgrid(*axes))


def both(name, function, *operands, shallow=False, compiled=jax.jit):
    """The results of jax, and those of a program without the primitive.

    What is `shallow` may be made of the primitive itself, for other operands.
    """
    program = jax.make_jaxpr(function)(*operands)
    assert name in jaxpr_primitives(program)
    given = {id(equation) for equation in program.eqns}
    lacks = (
        (lambda each: id(each) in given) if shallow else (lambda each: each.primitive.name == name)
    )
    without = decompose(program, lambda equation: not lacks(equation))
    assert shallow or name not in operation_names(without)
    return jax.tree.leaves(function(*operands)), compiled(jaxpr_as_fun(without))(*operands)


def check_each(name, function, *operands, rtol=3e-6, atol=1e-37):
    """Number by number, with the signs of zeros; XLA would simplify one program of it all."""
    for expected, found in zip(*both(name, function, *operands, compiled=lambda each: each)):
        expected, found = np.asarray(expected), np.asarray(found)
        for place in range(expected.size):
            where = f"{name}({', '.join(str(each[place]) for each in operands)})"
            assert_close(found[place], expected[place], rtol=rtol, atol=atol, where=where)
            if expected[place] == 0 and found[place] == 0:
                assert np.signbit(found[place]) == np.signbit(expected[place]), where


def check(name, function, *operands, rtol=1e-5):
    for expected, found in zip(*both(name, function, *operands), strict=True):
        assert_close(found, expected, rtol=rtol, where=name)


ELEMENTWISE = ["square", "rsqrt", "cbrt", "exp2", "expm1", "log1p", "log2", "tan", "sinh", "cosh"]
ELEMENTWISE += ["asinh", "acosh", "atanh", "asin", "acos", "atan", "erf", "erfc", "erf_inv"]
ELEMENTWISE += ["bessel_i0e", "bessel_i1e"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_one_number(name):
    function = jnp.log2 if name == "log2" else getattr(lax, name)
    if name == "log2" and "log2" not in jaxpr_primitives(jax.make_jaxpr(function)(HOSTILE)):
        pytest.skip("jax makes it of two logarithms")
    check_each(name, jax.jit(function), HOSTILE)


@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_gamma_functions(name):
    x = HOSTILE[HOSTILE != 0]  # at 0 versions of jax differ
    check_each(name, jax.jit(getattr(lax, name)), x, atol=2e-6)


@pytest.mark.parametrize("name", ["atan2", "nextafter"])
def test_functions_of_two_numbers(name):
    check_each(name, getattr(lax, name), *PAIRS)


FUNCTIONS = {
    "igamma": grid(SMALL[1:], np.append(SMALL, np.float32(np.inf))),
    "igammac": grid(SMALL[1:], np.append(SMALL, np.float32(np.inf))),
    "regularized_incomplete_beta": grid(LIMITS, LIMITS, SHARES),
    "zeta": grid(
        np.float32([-2, -0.0, 0.5, 1, 1.5, 2, 6, 20]), np.append(SMALL[:11], np.float32(-2))
    ),
    "igamma_grad_a": grid(SMALL, np.append(SMALL, np.float32(np.inf))),
    "polygamma": grid(np.float32([0, 1, 2, 5]), SMALL[1:11]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_statistics(name):
    function = getattr(lax, {"regularized_incomplete_beta": "betainc"}.get(name, name))
    check_each(name, jax.jit(function), *FUNCTIONS[name], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_products(bits):
    weight = RANDOM.normal(size=(64, 32)).astype(np.float32)
    linear, table = pax.Linear(64, 32, with_bias=False), pax.Embed(64, 32)
    (small, _), (rows, _) = (
        pax.quantize(layer.replace(weight=weight), bits=bits) for layer in (linear, table)
    )
    x = RANDOM.normal(size=(2, 64)).astype(np.float32)
    convolution, _ = pax.quantize(pax.Conv1D(64, 32, 1), bits=bits)
    weight = jnp.asarray(weight, jnp.bfloat16)
    narrow = lambda x: quantized.narrow_dot(x, weight, -2, "float32")  # noqa: E731
    for name, function, operand in (
        ("quantized_dot", small, x),
        ("quantized_rows", rows, np.array([3, 0, 63])),
        ("dequantize", lambda x: x + small.weight.dequantized(), np.ones(32, np.float32)),
        ("pointwise_convolution", convolution, x[:, None]),
        ("narrow_dot", narrow, x),
    ):
        (expected,), (found,) = both(name, function, operand)
        assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, -1, -2])
def test_whole_powers(exponent):
    check_each("integer_pow", lambda x: lax.integer_pow(x, exponent), HOSTILE)


def test_whole_powers_of_complex_numbers():
    x = np.array([1 + 2j, -3j, 0.5], np.complex64)
    check("integer_pow", lambda x: lax.integer_pow(x, 3), x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("name", ["population_count", "clz", "mulhi"])
def test_bits(name, dtype):
    if not hasattr(lax, name):
        pytest.skip("not in this version of jax")
    ends = np.iinfo(dtype)
    few = [0, 1, 2, 3, 100, ends.max, ends.max - 1, ends.min, ends.min + 1, ends.max // 3]
    numbers = np.array(few, dtype)
    operands = grid(numbers, numbers) if name == "mulhi" else (numbers,)
    check(name, getattr(lax, name), *operands)


@pytest.mark.parametrize("name", ["cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_cumulative_operations(name):
    def run(*operands):
        function = getattr(lax, name)
        return [
            function(x, axis=x.ndim // 2, reverse=reverse)
            for x in operands
            for reverse in (False, True)
        ]

    x = ROWS.copy()
    x[0, 5, 1], x[1, 7, 2], x[1, 8, 2], x[2, 3, :] = np.nan, np.inf, np.inf, -np.inf
    whole = RANDOM.integers(0, 2**64, 9, np.uint64).astype(np.uint32)
    more = {"cumprod": [SQUARE[0] * COMPLEX[0]], "cummax": [whole], "cummin": [whole]}
    check(name, run, x, *more.get(name, ()))
    long = RANDOM.normal(size=5000).astype(np.float32) / 100 + 1
    check(name, run, long, rtol=1e-3)


WINDOWS = [
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME", None, None),
    ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", None, None),
    ((1, 7, 5, 1), (1, 1, 2, 1), ((0, 0), (2, 3), (1, 1), (0, 0)), None, (1, 1, 2, 1)),
    ((1, 3, 3, 1), (1, 1, 1, 1), ((0, 0), (0, 1), (1, 2), (0, 0)), (1, 2, 1, 1), None),
    ((1, 1, 6, 1), (1, 2, 3, 1), "VALID", None, None),
]


#: Their start and function, and windows with padding and without.
REDUCTIONS = {
    "reduce_window_sum": (0.0, lax.add, 1, 2),
    "reduce_window_max": (-np.inf, lax.max, 0, 3),
    "reduce_window_min": (np.inf, lax.min, 1, 4),
    "reduce_window": (2.0, lax.mul, 0, 3),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_windows(name):
    start, function, *windows = REDUCTIONS[name]
    for window in windows:
        check(name, lambda x, w=WINDOWS[window]: lax.reduce_window(x, start, function, *w), IMAGES)


@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize("reduce", [lax.max, lax.min])
def test_gradients_of_pools(window, reduce):
    start = -np.inf if reduce is lax.max else np.inf

    def pool(x):
        return lax.reduce_window(x, start, reduce, *window)

    check("select_and_gather_add", lambda x, t: jax.jvp(pool, (x,), (t,))[1], IMAGES, -IMAGES)
    tied = np.round(IMAGES)  # the first of equals is taken
    check("select_and_scatter_add", lambda x, given: jax.vjp(pool, x)[1](given), tied, pool(IMAGES))


def test_booleans_are_scattered_by_or():
    """XLA adds booleans so, and jax has no function for it."""
    source, image = np.array([True, False, True]), np.array([0, 1, 1, 0, 0, 1], bool)
    windows = {"window_dimensions": (2,), "window_strides": (2,), "padding": [(0, 0)]}
    found = select_and_scatter_add(source, image, select_prim=lax.ge_p, **windows)
    assert found.tolist() == [False, True, False, False, False, True]


@pytest.mark.parametrize(("half", "whole"), [("float16", "int16"), ("bfloat16", "uint16")])
def test_bits_of_halves(half, whole):
    bits = np.arange(2**16, dtype=np.uint16).view(whole)
    numbers = np.asarray(lax.bitcast_convert_type(bits, half))
    regular = ~np.isnan(numbers.astype(np.float32))  # which of the NaN, nobody promises
    to_half, to_bits = (lambda x, d=d: lax.bitcast_convert_type(x, d) for d in (half, whole))
    expected, found = both("bitcast_convert_type", to_half, bits, shallow=True)
    assert_close(np.isnan(found[0]), ~regular)
    assert_close(found[0].view(whole)[regular], bits[regular])
    expected, found = both("bitcast_convert_type", to_bits, numbers[regular], shallow=True)
    assert_close(found[0], expected[0])


def test_reductions():
    check("reduce_prod", lambda x: jnp.prod(x, (0, 2)), ROWS)
    check("reduce_prod", lambda x: jnp.prod(x[:, :0], 1), ROWS)

    def hypotenuse(one, other):
        return jnp.sqrt(one * one + other * other)

    check("reduce", lambda x: lax.reduce(x, 3.0, hypotenuse, (0, 1)), ROWS)
    check("reduce", lambda x: lax.reduce(x[:, :0], 3.0, hypotenuse, (1,)), ROWS)

    def later(one, other):
        return tuple(jnp.where(other[0] >= one[0], b, a) for a, b in zip(one, other))

    places = np.broadcast_to(np.arange(17, dtype=np.int32)[:, None], ROWS.shape)
    starts = (np.float32(-9), np.int32(-1))
    check("reduce", lambda x, y: lax.reduce((x, y), starts, later, (1,)), ROWS, places)


def test_factorizations():
    check("cholesky", linalg.cholesky, POSITIVE, rtol=1e-4)
    check("cholesky", linalg.cholesky, np.stack([POSITIVE[0], -POSITIVE[0]]), rtol=1e-4)
    turned = SQUARE * COMPLEX
    check("cholesky", linalg.cholesky, turned @ turned.conj().transpose(0, 2, 1), rtol=1e-3)
    check("lu", linalg.lu, turned, rtol=1e-4)
    for matrix in (SQUARE, SQUARE[:, :4], SQUARE[:, :, :4]):
        check("lu", linalg.lu, matrix, rtol=1e-4)
    tall = SQUARE[:, :, :4]
    for matrix, whole in ((SQUARE[:, :4], False), (tall, True), (tall, False)):
        check("qr", lambda a, w=whole: linalg.qr(a, full_matrices=w), matrix, rtol=1e-4)
    for scale in (1, 1e30, 1e-30):  # the squares are infinite, or zero
        check("qr", lambda a: linalg.qr(a, full_matrices=True), SQUARE * scale, rtol=1e-4)


@pytest.mark.parametrize(("left", "transpose"), [(True, False), (True, True), (False, True)])
def test_products_of_reflections(left, transpose):
    if not hasattr(linalg, "ormqr"):
        pytest.skip("not in this version of jax")
    reflections, taus = jnp.linalg.qr(SQUARE[:, :, :4], mode="raw")
    product = functools.partial(linalg.ormqr, left=left, transpose=transpose)
    check("ormqr", product, reflections.mT, taus, SQUARE, rtol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_updates_of_factors(sign):
    if not hasattr(linalg, "cholesky_update"):
        pytest.skip("not in this version of jax")
    factor = sign * np.linalg.cholesky(POSITIVE[0]).T
    for matrix in (factor, SQUARE[0]):  # jax rotates whole rows
        for vector in (ROWS[0, :6, 0], np.zeros(6, np.float32)):
            check("cholesky_update", linalg.cholesky_update, matrix, vector, rtol=1e-4)


OF_NONE = {
    "householder_product": lambda x: linalg.householder_product(jnp.eye(4), x),
    "svd": lambda x: jnp.linalg.svd(jnp.ones((2, 4, 0)))[0] + x.sum(),
    "qr": lambda x: jnp.linalg.qr(jnp.ones((3, 0)), mode="complete")[0] + x.sum(),
    "cholesky": lambda x: jnp.linalg.cholesky(jnp.ones((0, 0))).sum() + x.sum(),
    "lu": lambda x: linalg.lu(jnp.ones((3, 0)))[2] + x.sum(),
}


@pytest.mark.parametrize("name", OF_NONE)
def test_factors_of_no_columns(name):
    check(name, OF_NONE[name], np.ones(0, np.float32))


@pytest.mark.parametrize("log_space", [False, True])
def test_gamma_samples(log_space):
    draw = jax.random.loggamma if log_space else jax.random.gamma
    shapes = np.float32([0.1, 0.7, 1, 2.5, 30])
    check("random_gamma", lambda a: draw(jax.random.key(3), a), shapes, rtol=1e-4)


def test_symmetric_products():
    product = functools.partial(linalg.symmetric_product, alpha=2.0, beta=0.5)
    check("symmetric_product", product, SQUARE[:, :, :4], POSITIVE, rtol=1e-4)


def test_polynomials():
    if not hasattr(lax, "polynomial"):
        pytest.skip("not in this version of jax")
    for x in (jnp.float32(0.5), jnp.asarray(ROWS[0])):
        check("polynomial", lambda x, y: lax.polynomial(x, (y, 2.0, y)), x, jnp.asarray(ROWS[1]))


def add_backwards(x, y):
    return x[::-1] + y


def third_party(function):
    """A primitive of another library, with the name of one of jax's."""
    primitive = Primitive("add")
    primitive.def_impl(function)
    primitive.def_abstract_eval(lambda x, y: x)
    return primitive.bind


@pytest.mark.parametrize("wrapper", [lambda f: f, functools.partial, jax.jit])
def test_primitives_of_other_libraries_are_what_implements_them(wrapper):
    operands = jnp.asarray(SMALL), jnp.asarray(SMALL)
    program = jax.make_jaxpr(third_party(wrapper(add_backwards)))(*operands)
    without = decompose(program, lambda _: True)  # a target that has jax's `add`
    (found,) = jaxpr_as_fun(without)(*operands)
    assert_close(found, add_backwards(*operands))


def test_primitives_of_other_libraries_that_jax_cannot_trace_are_refused(tmp_path):
    operands = jnp.asarray(SMALL), jnp.asarray(SMALL)
    function = third_party(lambda x, y: np.asarray(x) + y)
    program = jax.make_jaxpr(function)(*operands)
    assert decompose(program, lambda _: True) is program
    assert "TracerArrayConversionError" in not_decomposed(program.eqns[0])
    with pytest.raises(errors.UnsupportedOperationError, match="TracerArrayConversionError"):
        to_onnx(lambda x: function(x, x), tmp_path / "m", spec("3"))  # which has jax's `add`


def test_matrices_without_elements():
    for name, function in (("cholesky", linalg.cholesky), ("lu", linalg.lu), ("qr", jnp.linalg.qr)):
        check(name, function, np.zeros((3, 0, 0), np.float32))


def test_triangular_systems():
    matrix = SQUARE + 4 * np.eye(6, dtype=np.float32)
    names = ("left_side", "lower", "transpose_a", "unit_diagonal")
    for one, two, three in itertools.product([False, True], repeat=3):  # all pairs of options
        turn = COMPLEX if one != two else np.float32(1)
        options = dict(zip(names, (one, two, three, one ^ two ^ three)), conjugate_a=one != two)
        function = lambda a, b, o=options: linalg.triangular_solve(a, b, **o)  # noqa: E731
        check("triangular_solve", function, matrix * turn, POSITIVE * turn, rtol=1e-3)
    diagonals = (ROWS[:, :, 0], ROWS[:, :, 1] + 5, ROWS[:, :, 2])
    check("tridiagonal_solve", linalg.tridiagonal_solve, *diagonals, ROWS, rtol=1e-4)


def test_eigenvalues():
    (_, expected), (vectors, values) = both("eigh", lambda a: linalg.eigh(a), POSITIVE)
    assert_close(values, expected, rtol=1e-5)
    assert_close(np.asarray(vectors * values[:, None]) @ vectors.mT, POSITIVE, rtol=1e-5)
    check("svd", lambda a: linalg.svd(a, compute_uv=False), SQUARE)
    for matrix in (SQUARE[:, :4], SQUARE[:, :, :4]):
        expected, found = both("svd", lambda a: linalg.svd(a, full_matrices=False), matrix)
        u, values, v = map(np.asarray, found)
        assert_close(values, expected[1], rtol=1e-5)
        assert_close(u * values[:, None] @ v, matrix, rtol=1e-5)


@pytest.mark.parametrize("matrix", [SQUARE[:, :4], SQUARE[:, :, :4], SQUARE[:, [0, 0, 1, 1, 0, 0]]])
def test_all_vectors_are_orthogonal_whatever_the_rank(matrix):
    found = both("svd", lambda a: linalg.svd(a, full_matrices=True), matrix)[1]
    u, values, v = map(np.asarray, found)
    count = values.shape[-1]
    assert_close(u[..., :count] * values[:, None] @ v[:, :count], matrix, rtol=1e-5)
    for each in (u, v):
        assert_close(each.mT @ each, np.eye(each.shape[-1]) + 0 * each, atol=1e-5)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_eigenvalues_of_very_large_and_small_matrices(scale):
    check("eigh", jnp.linalg.eigvalsh, POSITIVE * np.float32(scale), rtol=1e-5)
    check("svd", jnp.linalg.svdvals, SQUARE * np.float32(scale), rtol=1e-5)


def test_eigenvalues_of_complex_matrices():
    matrix = POSITIVE + 1j * np.tril(SQUARE, -1) - 1j * np.tril(SQUARE, -1).mT
    vectors, values = eigh(matrix.astype(np.complex64), lower=True)
    assert_close(values, np.linalg.eigvalsh(matrix), rtol=1e-5)
    assert_close((vectors * values[:, None]) @ jnp.conj(vectors.mT), matrix, rtol=1e-5)


def test_eigenvalues_of_a_large_matrix_round_once():
    matrix = RANDOM.normal(size=(50, 50)).astype(np.float32)
    matrix = matrix + matrix.T
    _, (found,) = both("eigh", jnp.linalg.eigvalsh, matrix)
    assert_close(found, np.linalg.eigvalsh(matrix.astype(np.float64)), rtol=2e-6)
    _, (found,) = both("svd", jnp.linalg.svdvals, matrix[:, :30])
    exact = np.linalg.svd(matrix[:, :30].astype(np.float64), compute_uv=False)
    assert_close(found, exact, rtol=2e-6)


#: Parts of others, or of newer versions of jax: tested by those, and in the runtimes.
OF_OTHERS = [
    *("geqrf", "householder_product", "lu_pivots_to_permutation", "custom_linear_solve"),
    *("platform_index", "one_minus_square", "threefry2x32"),
    "iota_2x32_shape",
]


def test_halves_are_computed_as_float32():
    x = jnp.linspace(-3, 3, 50, dtype=jnp.bfloat16)
    (expected,), (found,) = both("sinh", jax.jit(lax.sinh), x)
    assert found.dtype == jnp.bfloat16
    assert_close(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=4e-3)


def test_what_is_not_exact_enough_stays():
    with jax.enable_x64(True):
        program = jax.make_jaxpr(lax.bessel_i0e)(np.ones(2))
        assert decompose(program, lambda _: False) is program
        assert not_decomposed(program.eqns[0]) == "of float64"
        check_each("sinh", jax.jit(lax.sinh), HOSTILE.astype(np.float64), rtol=1e-14)
        check_each("log1p", jax.jit(lax.log1p), HOSTILE.astype(np.float64), rtol=1e-14)


def test_programs_inside_of_loops_are_looked_into():
    def function(x):
        return lax.fori_loop(0, 3, lambda _, y: jnp.where(y > 0, lax.cbrt(y), lax.tan(y)), x)

    program = jax.make_jaxpr(function)(HOSTILE[:4])
    without = decompose(program, lambda e: e.primitive.name not in ("cbrt", "tan"))
    assert not jaxpr_primitives(without) & {"cbrt", "tan"}
    assert_close(jaxpr_as_fun(without)(HOSTILE[:4])[0], function(HOSTILE[:4]))


def test_a_program_that_lacks_nothing_is_the_same_object():
    program = jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(HOSTILE)
    assert decompose(program, lambda _: True) is program


def test_two_that_are_made_of_each_other_stay_where_neither_is():
    program = jax.make_jaxpr(lax.atan)(HOSTILE)
    left = decompose(program, lambda e: e.primitive.name not in ("atan", "atan2"))
    assert "atan" in jaxpr_primitives(left)


def test_an_operation_that_is_replaced_says_the_same_line():
    program = jax.make_jaxpr(lambda x: lax.cbrt(x))(HOSTILE)
    (call,) = decompose(program, lambda e: e.primitive.name != "cbrt").eqns
    assert call.source_info is program.eqns[0].source_info


def test_windows_along_symbolic_sizes():
    shape = jax.export.symbolic_shape("n, h")
    window = ((1, 3), (1, 2), "VALID")
    function = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *window)  # noqa: E731
    program = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, jnp.float32))
    without = decompose(program, lambda e: e.primitive.name != "reduce_window_max")
    assert "reduce_window_max" not in jaxpr_primitives(without)
    (call,) = without.eqns
    (inner,) = inner_programs(call)
    assert str(inner.out_avals[0].shape) == str(call.outvars[0].aval.shape)


ROUNDINGS = {
    "round_inputs": lambda x: quantized.StaticInputs(jnp.float32(0.05), jnp.int8(3)).rounded(x, ()),
    "round_rows": lambda x: quantized.DynamicInputs().rounded(x, (-1,)),
    "bound_outputs": lambda x: quantized.OutputRange(x[0], x[1]).bounded(x, -1),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounded_activations(name):
    x = jnp.array([[0.0, -0.0, 1.0, -2.5, 100.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    program = jax.make_jaxpr(ROUNDINGS[name])(x)
    without = decompose(program, lambda e: e.primitive.name != name)
    assert name in jaxpr_primitives(program) and name not in jaxpr_primitives(without)
    (found,) = jaxpr_as_fun(without)(x)
    assert_close(found, ROUNDINGS[name](x))


AT = np.array([[2, -1, 7], [0, 3, -(2**31)], [2, 2, 2**31 - 1]], np.int32)
NUMBERS = RANDOM.normal(size=(4, 3, 5)).astype(np.float32)
MODES = ("clip", "fill", "promise_in_bounds")
LOOKUPS = {
    "rows": lambda x, at, mode: x.at[at].get(mode=mode),
    "in the middle": lambda x, at, mode: x.at[:, at].get(mode=mode),
    "apart": lambda x, at, mode: x.at[at, :, at.T].get(mode=mode),
    "beside each other": lambda x, at, mode: x.at[:, at, at.T].get(mode=mode),
    "small places": lambda x, at, mode: x.at[at.astype(np.int8)].get(mode=mode),
    "large places": lambda x, at, mode: x.at[:, at.astype(np.uint32)].get(mode=mode),
    "whole numbers": lambda x, at, mode: x.astype(np.uint8).at[at].get(mode=mode),
    "truth values": lambda x, at, mode: (x > 0).at[at].get(mode=mode),
    "along": lambda x, at, mode: jnp.take_along_axis(x[:3], at[:, :, None], 2, mode=mode),
    "windows": lambda x, at, mode: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i, 0), (2, 5)))(
        x, jnp.r_[at[0], 1]
    ),
    "windows of one": lambda x, at, mode: jax.vmap(
        lambda i: lax.dynamic_slice(x, (i, i, 0), (3, 2, 5))
    )(at[1]),
}


@pytest.mark.parametrize("kind", LOOKUPS)
def test_lookups(kind):
    def run(x, at):
        inside = jnp.clip(at, 0, 2)
        return [LOOKUPS[kind](x, inside if mode == MODES[2] else at, mode) for mode in MODES]

    check("gather", run, jnp.asarray(NUMBERS), jnp.asarray(AT))


#: The primitives that jax has made of each, now or in the past.
SCATTERS = {
    "set": ("scatter",),
    "add": ("scatter-add", "scatter_add"),
    "subtract": ("scatter-sub", "scatter_sub"),
    "multiply": ("scatter-mul", "scatter_mul"),
    "max": ("scatter-max", "scatter_max"),
    "min": ("scatter-min", "scatter_min"),
}
PLACES = {
    "rows": lambda x, at: x.at[at[0]],
    "in the middle": lambda x, at: x.at[:, at[0]],
    "apart": lambda x, at: x.at[at[0], :, at[1]],
    "one": lambda x, at: x.at[at[0, 0]],
    "one of a row": lambda x, at: x.at[:, at[0, 0], 1:3],
    "small places": lambda x, at: x.at[at[0].astype(np.int8)],
}


#: Every place is set, every other update is made at three places, and each in each dtype.
UPDATES = [
    *(("set", kind, np.float32) for kind in PLACES),
    *(("set", "apart", dtype) for dtype in (np.int8, np.uint32, np.bool_)),
    ("max", "one", np.bool_),
    ("min", "rows", np.bool_),
    *(
        (how, list(PLACES)[(step + 2 * turn) % len(PLACES)], dtype)
        for step, how in enumerate(list(SCATTERS)[1:])
        for turn, dtype in enumerate((np.float32, np.int8, np.uint32))
    ),
]


@pytest.mark.parametrize(("how", "kind", "dtype"), UPDATES)
def test_updates(how, kind, dtype):
    values = (NUMBERS * 9).astype(np.int8).astype(dtype)
    values[0, 0, 0] = np.nan if dtype == np.float32 else values[0, 0, 1]
    at = AT[:2] if how == "set" else AT  # of equal places any one may win
    old = (NUMBERS[::-1] > 0).astype(dtype)
    shape = jax.eval_shape(lambda x, at: PLACES[kind](x, at).get(), old, at).shape
    old, at, new = map(jnp.asarray, (old, at, np.resize(values, shape).astype(dtype)))

    def update(x, at, new):
        return [getattr(PLACES[kind](x, at), how)(new, mode=mode) for mode in MODES[:2]]

    names = jaxpr_primitives(jax.make_jaxpr(update)(old, at, new))
    (name,) = names.intersection(SCATTERS[how])
    assert DECOMPOSITIONS.keys() >= {*SCATTERS[how]}
    check(name, update, old, at, new)


@pytest.mark.parametrize("place", [3, 7, 2**31 - 1, -9])
def test_one_update_of_a_large_array_reads_its_own_place_alone(place):
    """A key of a long cache: where the place is outside, its nearest one is written again."""

    def update(cache, at, new):
        return cache.at[0, at].set(new, mode="drop")

    given = jnp.asarray(NUMBERS), jnp.int32(place), jnp.ones(NUMBERS.shape[2])
    check("scatter", update, *given)
    program = decompose(
        jax.make_jaxpr(update)(*given), lambda each: each.primitive.name != "scatter"
    )
    equations = (each for each, _ in walk_equations(program))
    chosen = [each for each in equations if each.primitive.name == "select_n"]
    assert max(each.outvars[0].aval.size for each in chosen) < NUMBERS.size


def test_batches_of_updates():
    def update(x, i, new):
        write = jax.vmap(lambda row, i, new: lax.dynamic_update_slice(row, new, (i, 0)))
        return write(x, i, new), jax.vmap(lambda row, i, new: row.at[i].set(new[0, 0]))(x, i, new)

    at = jnp.array([1, 7, -2, 0], jnp.int32)
    check("scatter", update, jnp.asarray(NUMBERS), at, jnp.asarray(NUMBERS[:, :2]))


def test_lookups_in_symbolic_sizes():
    def run(x, at):
        flat = x.at[at, at].get(mode="clip"), x.at[:, at].add(1.0), x[1:]
        return [each.sum() for each in flat]

    structs = jax.export.symbolic_args_specs((NUMBERS, AT[0]), ("n, m, 5", "k"))
    program = jax.make_jaxpr(run)(*structs)
    lacks = ("gather", "scatter-add", "scatter_add")
    without = decompose(program, lambda each: each.primitive.name not in lacks)
    assert operation_names(without).isdisjoint(lacks)
    portable = flattened(without, (), {})
    for given in ((NUMBERS, AT[0]), (NUMBERS[:2, :2], AT[1, :2])):
        for found, expected in zip(portable.run(*given), run(*map(jnp.asarray, given))):
            assert_close(found, expected)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("mode", MODES[:2])
def test_updates_by_functions(kind, mode):
    """A function is applied as often as a place is given."""

    def update(x, at):
        return PLACES[kind](x, at).apply(lambda x: jnp.cos(x) * 3, mode=mode)

    check("scatter", update, jnp.asarray(NUMBERS), jnp.asarray(AT))


ORDERED = {
    "sort": lambda x: lax.sort(x, 1),
    "sort of pairs": lambda x: lax.sort((x[:, ::-1], x, x[::-1]), 0, num_keys=2),
    "top_k": lambda x: lax.top_k(x, 3),
    "top_k of an axis": lambda x: lax.top_k(x, 2, axis=0),
    "approx_top_k": lambda x: lax.approx_max_k(x, 3),
    "approx_top_k of parts": lambda x: lax.approx_min_k(x, 2, aggregate_to_topk=False),
}


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32, np.bool_])
@pytest.mark.parametrize("kind", ORDERED)
def test_orders(kind, dtype):
    if not kind.startswith("approx_top_k") or dtype == np.float32:  # jax has it for these
        values = np.resize([3, -1, np.inf, 3, -np.inf, 0, -0.0, 7], (4, 6)).astype(np.float32)
        with np.errstate(invalid="ignore"):
            values = values.astype(dtype)
        if dtype == np.float32 and kind.startswith("sort"):
            values[1, 2] = values[3, 1] = np.nan
        check(kind.split(" ")[0], ORDERED[kind], jnp.asarray(values))


HALVES = HOSTILE[:, None] + np.array([0, 0.5, -0.5], np.float32)
WHOLE = RANDOM.integers(-(2**31), 2**31, (3, 7, 2), np.int32)
CHOICES = {
    "clamp": (lambda x: lax.clamp(jnp.float32(-1), x, jnp.float32(2)), HALVES),
    "clamp ": (lambda x: lax.clamp(x[::-1], x, -x), HALVES),
    "round": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), HALVES),
    "is_finite": (lax.is_finite, HALVES),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (1,)), WHOLE),
    "reduce_and": (lambda x: lax.reduce_and(x | 1, (0, 2)), WHOLE),
    "reduce_or": (lambda x: lax.reduce_or(x, (0, 1, 2)), WHOLE),
    "reduce_xor ": (lambda x: lax.reduce_xor(x > 0, (1,)), WHOLE),
    "optimization_barrier": (lax.optimization_barrier, HALVES),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_choices(kind):
    function, operand = CHOICES[kind]
    check(kind.strip(), function, jnp.asarray(operand))


def test_choices_of_several():
    def choose(which, x):
        return lax.select_n(which, x, x + 1, x + 2)

    which = jnp.asarray(WHOLE % 5 - 1)
    (expected,), (found,) = both("select_n", choose, which, jnp.asarray(WHOLE), shallow=True)
    assert_close(found, expected)


def test_comparisons_in_the_order_of_sorting():
    x, y = PAIRS
    order = np.unique(HOSTILE)  # NaN last, and once
    ranks = [np.where(np.isnan(each), len(order), np.searchsorted(order, each)) for each in PAIRS]
    for name, compare in {"lt_to": np.less, "le_to": np.less_equal, "eq_to": np.equal}.items():
        assert_close(DECOMPOSITIONS[name](jnp.asarray(x), jnp.asarray(y)), compare(*ranks))


UNCHANGED = (
    "copy", "device_put", "layout_constraint", "name",
    "optimization_barrier", "pvary", "reduced_vary_cast", "reshard", "sharding_constraint",
    "stage", "stop_gradient",
)  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_changes_nothing(name):
    (found,) = DECOMPOSITIONS[name](HOSTILE)
    assert found is HOSTILE


def test_arrays_beside_each_other():
    assert DECOMPOSITIONS["tie"](SMALL, HOSTILE) is HOSTILE
    rows = [jnp.asarray(each) for each in ROWS]
    stacked = DECOMPOSITIONS["stack"](*rows, axis=1)
    assert_close(stacked, np.stack(ROWS, 1))
    for found, expected in zip(DECOMPOSITIONS["unstack"](stacked, axis=1), ROWS, strict=True):
        assert_close(found, expected)


def test_products_of_groups():
    groups = jnp.array([3, 0, 4], jnp.int32)
    x, y = ROWS[0, :9], RANDOM.normal(size=(3, 4, 5)).astype(np.float32)
    x[8] = np.nan  # of no group
    check("ragged_dot_general", lax.ragged_dot, jnp.asarray(x), jnp.asarray(y), groups)


WORDS = np.array([0, 1, 5, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1], np.uint32)
IN_ORDER = {
    **{name: getattr(lax, name) for name in ("lt", "le", "gt", "ge", "max", "min")},
    "argmax": lambda x, y: lax.argmax(x ^ y, 0, np.int32),
    "argmin": lambda x, y: lax.argmin(x ^ y, 0, np.int32),
    "reduce_max": lambda x, y: lax.reduce_max(x, (0,)),
    "reduce_min": lambda x, y: lax.reduce_min(x ^ y if x.dtype == bool else x ^ y | 1, (0,)),
}


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        *((name, (WORDS, WORDS)) for name in IN_ORDER),
        *((name, ([False, True], [True, False, True])) for name in IN_ORDER),
    ],
)
def test_numbers_without_a_sign_and_truth_values_are_in_order(name, operands):
    x, y = (jnp.asarray(each) for each in grid(*operands))
    for expected, found in zip(*both(name, IN_ORDER[name], x, y, shallow=True)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_extremes_of_numbers_that_are_none(name):
    x = np.array([[1, np.nan, -np.inf], [np.inf, 3, -0.0]], np.float32)
    for axes in ((0,), (1,), (0, 1), ()):
        (expected,), (found,) = both(name, lambda x, a=axes: getattr(lax, name)(x, a), x)
        np.testing.assert_array_equal(found, expected)


def test_arrays_whose_numbers_do_not_matter():
    assert both("empty", lambda: lax.empty((2, 3), np.float32))[1][0].shape == (2, 3)


@pytest.mark.parametrize("which", [-3, 0, 1, 2, 7])
def test_branches_of_several(which):
    branches = [lambda x: x + 1, lambda x: x * 2, lambda x: -x]

    def choose(which, x):
        return lax.switch(which, branches, x)

    (expected,), (found,) = both("cond", choose, jnp.int32(which), SMALL, shallow=True)
    assert_close(found, expected)


def test_loops_that_end_one_by_one():
    @jax.vmap
    def halve(x):
        def step(state):
            return state[0] / 2, state[1] + state[0] * SQUARE[0]

        return lax.while_loop(lambda state: state[0] > 1, step, (x, jnp.zeros((6, 6))))

    x = jnp.array([9, 0.5, 70, np.nan], np.float32)
    for expected, found in zip(*both("while", halve, x, shallow=True)):
        assert_close(found, expected)


PADS = {
    "apart": ((1, 2, 0), (0, 3, 2), (1, 0, 1)),
    "cut": ((-1, 2, 0), (3, -4, 0), (0, -2, 0)),
    "both": ((-1, -1, 1), (3, -4, 2), (0, 0, 0)),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("apart", "float32"), ("cut", "int16"), ("both", "bool"), ("both", "complex64")],
)
def test_padding(kind, dtype):
    x = jnp.asarray(ROWS > 0 if dtype == "bool" else ROWS * 9).astype(dtype)
    (expected,), (found,) = both(
        "pad", lambda x, y: lax.pad(x, y, PADS[kind]), x, x[0, 0, 0], shallow=True
    )
    assert_close(found, expected)


def test_padding_with_sizes_of_numpy():
    """Gradients along symbolic sizes have such."""
    x, less = jnp.asarray(ROWS), np.int64(-1)
    (expected,), (found,) = both(
        "pad", lambda x: lax.pad(x, 0.0, [(0, less, 0)] * x.ndim), x, shallow=True
    )
    assert_close(found, expected)


def test_concatenations_leave_arrays_without_elements_out():
    x = jnp.asarray(ROWS)
    program = jax.make_jaxpr(lambda x: lax.concatenate([x[:0], x, x[1:1]], 0))(x)
    made = flattened(decompose(program, lambda _: True), [], {}).program
    assert not needed_equations(made.jaxpr)
    assert_close(jaxpr_as_fun(made)(x)[0], x)


CONVOLUTIONS = {
    "strides": ({"window_strides": (2, 3), "padding": "SAME"}, (3, 5)),
    "one whose padding cuts": ({"window_strides": (1, 1), "padding": ((-1, 2), (3, -2))}, (3, 5)),
    "spread": (
        {"padding": ((1, 2), (0, 1)), "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
        (3, 5),
    ),
    "groups": ({"padding": "VALID", "feature_group_count": 3}, (1, 6)),
    "groups of examples": ({"padding": "SAME", "batch_group_count": 2}, (3, 4)),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in CONVOLUTIONS),
        ("groups of examples", "int32"),
        ("spread", "bfloat16"),
        ("groups", "complex64"),
    ],
)
def test_convolutions(kind, dtype):
    options, features = CONVOLUTIONS[kind]
    options = {"window_strides": (1, 1), **options}
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jnp.asarray(IMAGES * 9).astype(dtype)
    kernel = jnp.asarray(RANDOM.normal(size=(3, 2, *features)) * 9).astype(dtype)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)

    (expected,), (found,) = both("conv_general_dilated", convolve, x, kernel)
    assert_close(found, expected, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8", "uint32"])
@pytest.mark.parametrize("start", [0, 2, 15, 100, -1, -100])
def test_windows_at_numbers(start, dtype):
    start = jnp.asarray(np.int64(start).astype(dtype))

    def take(x, start):
        return lax.dynamic_slice(x, (start, start, start), (2, 17, 3))

    def put(x, start):
        return lax.dynamic_update_slice(x, -x[:2, :, :3], (start, start, start))

    for name, function in {"dynamic_slice": take, "dynamic_update_slice": put}.items():
        check(name, function, jnp.asarray(ROWS), start)
