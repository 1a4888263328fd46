"""Operations on complex numbers and random keys, in jax alone, by parts and by words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.lax import linalg

from pax_export._foundations.jaxpr import inner_programs, jaxpr_dtypes
from pax_export.export.portable.complex_numbers import COMPLEX
from pax_export.export.portable.decompositions import NotDecomposedError
from pax_export.export.portable.real_numbers import NotWrittenError, in_real_numbers, on_words
from tests.closeness import assert_close

PARTS = np.float32([0, -0.0, 1, -1, 0.5, -3, 1e-8, 1e9])
RANDOM = np.random.default_rng(0)


def complex_of(real, imag):
    found = np.empty(np.shape(real), np.complex64)
    found.real, found.imag = real, imag
    return found


GRID = complex_of(*(np.ravel(each) for each in np.meshgrid(PARTS, PARTS)))
DRAWN = complex_of(RANDOM.normal(size=(3, 24, 10)), RANDOM.normal(size=(3, 24, 10)))


def equation_of(function, *operands):
    equation = jax.make_jaxpr(function)(*operands).eqns[-1]
    for inner in inner_programs(equation):
        equation = getattr(inner, "jaxpr", inner).eqns[-1]
    return equation


def both(function, *operands):
    flat = []
    for each in operands:
        each = np.asarray(each)
        flat.extend((each.real, each.imag) if each.dtype.kind == "c" else (each,))
    found = jaxpr_as_fun(in_real_numbers(jax.make_jaxpr(function)(*operands)))(*flat)
    expected = np.asarray(jax.jit(function)(*operands))
    return expected, complex_of(*found) if expected.dtype.kind == "c" else np.asarray(found[0])


ONE = ["neg", "conj", "abs", "sign", "exp", "log", "log1p", "sqrt", "sin", "cos", "cosh", "tanh"]
ONE += ["tan", "asin", "acos", "atan", "asinh", "acosh", "atanh", "expm1", "logistic"]


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name):
    for expected, found, x in zip(*both(getattr(lax, name), GRID), GRID):
        assert_close([found.real, found.imag], [expected.real, expected.imag], 1e-5, 1e-30, str(x))


@pytest.mark.parametrize("name", ["sinh", "rsqrt", "add", "sub", "mul", "div", "pow", "eq", "ne"])
def test_functions_of_drawn_numbers(name):
    operands = (DRAWN, DRAWN[::-1])[: 1 + (name not in ("sinh", "rsqrt"))]
    expected, found = both(getattr(lax, name), *operands)
    assert_close(found, expected, rtol=1e-5)


def test_a_quotient_by_large_numbers_is_finite():
    x, y = complex_of([1e30, 1e-30], [1e30, 1e-30]), complex_of([3e30, 3e-30], [1e30, 1e-30])
    expected, found = both(lax.div, x, y)
    assert_close(found, expected, rtol=1e-5)


def test_quotients_by_zero_and_infinity():
    x, y = complex_of([2, 2, 2], [3, 3, 3]), complex_of([0, np.inf, 1], [0, 0, -np.inf])
    expected, found = both(lax.div, x, y)
    assert_close([found.real, found.imag], [expected.real, expected.imag])


@pytest.mark.parametrize("keys", [1, 2])
def test_order(keys):
    z = complex_of([1, 1, -2, 1, np.nan, 0], [3, -1, 0, 3, 0, np.inf])
    expected, found = both(lambda z: lax.sort((z, z[::-1], jnp.arange(6)), num_keys=keys)[2], z)
    assert_close(found, expected)


DECOMPOSED = {
    "exp2": jnp.exp2,
    "log2": jnp.log2,
    "products": lambda z: jnp.prod(z, 1),
    "windows": lambda z: lax.reduce_window(
        z, np.complex64(0), lax.add, (1, 3, 1), (1, 2, 1), "SAME"
    ),
    "any function": lambda z: lax.reduce(z, np.complex64(0), lambda x, y: x + y + x * y, (2,)),
    "polynomials": lambda z: jnp.polyval(jnp.arange(3.0), z),
    "tridiagonal": lambda z: linalg.tridiagonal_solve(z[0], z[1] + 9, z[2], z[0][..., None]),
    "sort": lambda z: lax.sort(z, 2),
    "iota": lambda z: z * lax.iota("complex64", 10),
    "multiplied": lambda z: z.at[jnp.array([0, 2, 0])].multiply(2j),
    "a part multiplied": lambda z: z.at[..., 1:-1].multiply(2j),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_operations(name):
    expected, found = both(DECOMPOSED[name], DRAWN)
    assert_close(found, expected, rtol=1e-4)


def test_parts_and_conversions():
    for function in (lax.real, lax.imag):
        expected, found = both(function, DRAWN)
        assert_close(found, expected)
    expected, found = both(lambda x: lax.convert_element_type(x, jnp.complex64), PARTS)
    assert_close(found, expected)
    expected, found = both(lax.complex, PARTS, PARTS[::-1])
    assert_close(found, expected)


def test_products():
    numbers = (((1,), (1,)), ((0,), (0,)))
    expected, found = both(lambda x, y: lax.dot_general(x, y, numbers), DRAWN, DRAWN[::-1])
    assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(10,), (24, 10)])
@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_fourier_transforms(kind, lengths):
    for last in (10, 11) if kind == "irfft" else (10,):
        whole = (*lengths[:-1], last)
        x = {"rfft": DRAWN.real, "irfft": DRAWN[..., : last // 2 + 1]}.get(kind, DRAWN)
        expected, found = both(lambda x, k=kind, n=whole: lax.fft(x, k, n), x)
        assert_close(found, expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *(("fft", length) for length in (131, 1021, 1024, 1500)),
        ("rfft", 131),
        ("rfft", 1024),
        ("irfft", 1021),
        ("irfft", 1500),
    ],
)
def test_long_fourier_transforms(kind, length):
    count = length // 2 + 1 if kind == "irfft" else length
    x = complex_of(RANDOM.normal(size=(2, count)), RANDOM.normal(size=(2, count)))
    x = x.real if kind == "rfft" else x
    expected, found = both(lambda x: lax.fft(x, kind, (length,)), x)
    assert_close(found, expected, rtol=3e-6)


def test_each_operation_has_a_test():
    import inspect
    import sys

    text = inspect.getsource(sys.modules[__name__])
    # jax has these for floating point numbers only, or makes them of others.
    others = {"add_any", "is_finite", "convert_element_type", "dot_general", "real", "imag"}
    assert not [name for name in COMPLEX.keys() - others - {"complex"} if f'"{name}"' not in text]


def words(keys):
    is_key = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(keys) if is_key else keys


KEY = {
    "seed": (jax.random.key, (7,)),
    "bits": (lambda k: jax.random.bits(k, (5, 3)), (jax.random.key(3),)),
    "bits of several": (
        jax.vmap(lambda k: jax.random.bits(k, (4,), "uint8")),
        (jax.random.split(jax.random.key(3), 2),),
    ),
    "split": (lambda k: jax.random.split(k, 3), (jax.random.key(2**31),)),
    "folded": (jax.random.fold_in, (jax.random.key(1), np.uint32(9))),
    "folded with each": (
        jax.vmap(jax.random.fold_in, (None, 0)),
        (jax.random.key(1), np.uint32([9, 0])),
    ),
    "each folded": (
        jax.vmap(jax.random.fold_in, (0, None)),
        (jax.random.split(jax.random.key(1), 3), np.uint32(9)),
    ),
    "wrapped": (jax.random.wrap_key_data, (np.uint32([[1, 2], [3, 4]]),)),
    "unwrapped": (jax.random.key_data, (jax.random.key(5),)),
}


@pytest.mark.parametrize("name", KEY)
def test_random_keys(name):
    function, operands = KEY[name]
    equation = next(
        each
        for each in flat_equations(jax.make_jaxpr(function)(*operands))
        if each.primitive.name.startswith("random_")
    )
    given = [words(jnp.asarray(each)) for each in operands]
    given = [x.astype(a.aval.dtype) if x.ndim == 0 else x for x, a in zip(given, equation.invars)]
    (found,) = jaxpr_as_fun(on_words(equation))(*given)
    assert_close(found, words(function(*operands)))


def flat_equations(program):
    for equation in getattr(program, "jaxpr", program).eqns:
        inner = list(inner_programs(equation))
        for each in inner:
            yield from flat_equations(each)
        if not inner:
            yield equation


def test_keys_of_another_generator_are_refused():
    equation = equation_of(jax.random.key_data, jax.random.key(0, impl="rbg"))
    with pytest.raises(NotDecomposedError, match="threefry"):
        on_words(equation)


def drawn(key, row):
    key, now = jax.random.split(key)
    return key, row + jax.random.uniform(now)


def loops(x, z, seed):
    key = jax.random.wrap_key_data(seed)
    keys = jax.random.split(key, 3)
    return (
        lax.scan(lambda c, row: (c * row + z[0], (c, row)), z[0], z),
        lax.while_loop(lambda s: jnp.abs(s[0]) < 3, lambda s: s * 2, z),
        lax.cond(x[0] > 0, lambda s: s, lambda s: s * 2j, z),
        lax.fori_loop(0, 3, lambda i, k: jax.random.split(k)[i % 2], key),
        lax.fori_loop(0, 3, lambda i, s: s ^ jax.random.bits(jax.random.fold_in(key, i)), seed[0]),
        lax.scan(drawn, key, x),
        lax.while_loop(lambda s: s[1] < 2, lambda s: drawn(*s), (key, x[0] * 0))[1],
        lax.cond(x[0] > 0, jax.random.bits, lambda k: jax.random.bits(jax.random.split(k)[1]), key),
        lax.map(lambda k: jax.random.randint(k, (2,), 0, 100), keys),
        jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys[::-1]),
        jnp.where(x > 0, 1j, 2.0),
        z.at[jnp.array([0, 2])].add(1j),
        lax.sort((x, z), num_keys=1),
        jax.random.gamma(key, jnp.abs(x)),
        jax.random.loggamma(jax.random.key(3), x[:2, None] ** 2),
        jnp.linalg.eigh(jnp.outer(z, z.conj()))[0],
        z**3,
    )


def test_whole_programs_have_real_numbers_alone():
    x = jnp.asarray(RANDOM.normal(size=4).astype(np.float32))
    z = jnp.asarray(DRAWN[0, 0, :4])
    seed = jnp.array([3, 7], jnp.uint32)
    program = in_real_numbers(jax.make_jaxpr(loops)(x, z, seed))
    names = {str(dtype) for dtype in jaxpr_dtypes(program)}
    assert names <= {"float32", "int32", "uint32", "bool"}
    found = iter(jaxpr_as_fun(program)(x, z.real, z.imag, seed))
    for expected in map(words, jax.tree.leaves(loops(x, z, seed))):
        given = [next(found) for _ in range(1 + jnp.iscomplexobj(expected))]
        given = complex_of(*given) if len(given) > 1 else given[0]
        assert_close(given, expected, rtol=1e-4, atol=1e-5)
    assert not list(found)


def test_a_program_of_real_numbers_is_the_same_object():
    program = jax.make_jaxpr(jnp.sin)(PARTS)
    assert in_real_numbers(program) is program


@pytest.mark.parametrize("way", ["min", "max"])
def test_what_is_none_of_parts_is_refused_with_its_place(way):
    def apply(z):
        return lax.fori_loop(0, 2, lambda i, z: getattr(z.at[jnp.array([0])], way)(z[1:2]), z)

    with pytest.raises(NotWrittenError, match="complex") as caught:
        in_real_numbers(jax.make_jaxpr(apply)(DRAWN[0, 0]))
    assert caught.value.equation.primitive.name.startswith("scatter")
    assert caught.value.callers
