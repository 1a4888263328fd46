"""Each family of operations of jax, written for ONNX and run by onnxruntime.

The numbers have NaN, infinities, ties, zeros of both signs and the ends of their dtypes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pax_export.export import load, spec, to_onnx
from tests.closeness import assert_close

ODD = np.array([[0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, 0.5, -7.0, 7.0]], np.float32)
WHOLE = np.array([[0, 1, -1, 7, 7, -8, 2**31 - 1, -(2**31), 65, 12]], np.int32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows(array, count):
    """The array, and it again in other orders, as so many rows."""
    return np.concatenate([np.roll(array, 3 * step, -1) for step in range(count)])


def check(path, function, *calls, specs, opset=21, rtol=1e-5, atol=1e-6):
    """The file gives what the function gives, for each call."""
    model = ({}, lambda _, *args: function(*args))
    to_onnx(model, path, specs, opset=opset, validate=False, exact=True)
    loaded = load(path)
    for arrays in calls:
        found, expected = loaded(*arrays), jax.jit(function)(*arrays)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        expected = jax.tree.map(np.asarray, expected)
        for (place, one), other in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            name = jax.tree_util.keystr(place)
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            assert_close(one, other, rtol=rtol, atol=atol, where=name)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def test_arithmetic_of_floats(path):
    def run(x, y):
        return {
            "add": x + y,
            "sub": x - 1,
            "mul": x * y,
            "div": x / y,
            "rem": lax.rem(x, y),
            "max": jnp.maximum(x, y),
            "min": jnp.minimum(x, y),
            "relu": jax.nn.relu(x),
            "clip": jnp.clip(x, -1, 2),
            "clamp": lax.clamp(-1.0, x, 2.0),
            "sign": jnp.sign(x),
            "floor": jnp.floor(x),
            "ceil": jnp.ceil(x),
            "round": jnp.round(x),
            "away": lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
            "finite": jnp.isfinite(x),
            "nan": jnp.isnan(x),
            "power": jnp.abs(y) ** 1.5,
            "cube": y**3,
            "inverse": y**-2,
            "less": x < y,
            "equal": x == y,
            "unequal": x != y,
            "where": jnp.where(x > y, x, y),
            "bools": jnp.where(x > y, x < 1, y < 1),
            "select": lax.select_n(jnp.int32(y > 0) + jnp.int32(y > 1), x, y, x * 2),
            "logical": (x > 0) & ~(y > 0) | (x == y) ^ (x < y),
        }

    calls = [(rows(ODD, n), random(n, 10, seed=n)) for n in (1, 3)]
    check(path, run, *calls, specs=(spec("batch, 10"), spec("batch, 10")))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint8", "int16"])
def test_arithmetic_of_whole_numbers(path, dtype):
    def run(x, y):
        signed = {} if dtype.startswith("u") else {"negative": -x, "abs": jnp.abs(x)}
        return signed | {
            "add": x + y,
            "sub": x - y,
            "mul": x * y,
            "div": lax.div(x, y),
            "rem": lax.rem(x, y),
            "floordiv": x // 3,
            "mod": x % 3,
            "max": jnp.maximum(x, y),
            "power": x**3,
            "less": x < y,
            "and": x & y,
            "or": x | y,
            "xor": x ^ y,
            "not": ~x,
            "left": x << 3,
            "right": x >> 2,
            "logical": lax.shift_right_logical(x, jnp.asarray(3, x.dtype)),
            "far": lax.shift_left(x, jnp.asarray(y & 63, x.dtype)),
            "count": lax.population_count(x),
            "zeros": lax.clz(x),
            "float": x.astype(jnp.float32),
            "sum": jnp.sum(x, -1),
            "sorted": jnp.sort(x, -1),
        }

    x = rows(WHOLE, 3).astype(dtype)
    y = np.roll(x, 1, -1)
    check(path, run, (x, y), specs=(spec("batch, 10", dtype), spec("batch, 10", dtype)))


def test_functions(path):
    def run(x, y):
        return {
            name: getattr(jnp, name)(x)
            for name in "exp sin cos tanh log1p expm1 exp2 cbrt arctan sinh arcsinh".split()
        } | {
            "log": jnp.log(y),
            "log2": jnp.log2(y),
            "sqrt": jnp.sqrt(y),
            "rsqrt": lax.rsqrt(y),
            "acosh": jnp.arccosh(1 + y),
            "sigmoid": jax.nn.sigmoid(x),
            "gelu": jax.nn.gelu(x),
            "softplus": jax.nn.softplus(x),
            "erf": lax.erf(x),
            "erf_inv": lax.erf_inv(jnp.tanh(x)),
            "lgamma": lax.lgamma(x * 3),
            "digamma": lax.digamma(jnp.abs(x) + 0.1),
            "atan2": jnp.arctan2(x, y - 1),
            "small": jnp.expm1(x * 1e-6) * 1e6,
            "log of small": jnp.log1p(x * 1e-6) * 1e6,
            "logsumexp": jax.nn.logsumexp(x, -1),
        }

    calls = [(random(n, 5), np.abs(random(n, 5, seed=1))) for n in (1, 4)]
    check(path, run, *calls, specs=(spec("n, 5"), spec("n, 5")), rtol=1e-4, atol=1e-5)


def test_conversions(path):
    def run(x, y):
        return {
            "to int": x.astype(jnp.int32),
            "to uint8": jnp.clip(x, 0, 255).astype(jnp.uint8),
            "to bool": x.astype(bool),
            "from bool": (x > 0).astype(jnp.float32) + (x > 1).astype(jnp.int32),
            "wrapped": y.astype(jnp.int8),
            "unsigned": y.astype(jnp.uint32),
            "back": y.astype(jnp.uint32).astype(jnp.int32),
            "half": x.astype(jnp.float16).astype(jnp.float32),
            "brain": x.astype(jnp.bfloat16).astype(jnp.float32),
            "reduced": lax.reduce_precision(x, 8, 7),
            "bits": lax.bitcast_convert_type(x, jnp.int32),
            "from bits": lax.bitcast_convert_type(
                lax.bitcast_convert_type(x, jnp.uint32), jnp.float32
            ),
        }

    check(path, run, (rows(ODD, 2), rows(WHOLE, 2)), specs=(spec("n, 10"), spec("n, 10", "int32")))


def test_shapes_of_symbolic_size(path):
    def run(x):
        n, m = x.shape[0], x.shape[1]
        return {
            "flat": x.reshape(-1),
            "swapped": x.transpose(1, 0, 2),
            "merged": x.reshape(n * m, 4),
            "split": x.reshape(n, m, 2, 2),
            "broadcast": jnp.broadcast_to(x[:, :1], x.shape),
            "number, then rows, then more": jnp.broadcast_to(x.min(), x.shape[:1])[:, None, None]
            * x,
            "outer": x[:, :, None] + x[:, None],
            "joined": jnp.concatenate([x, x[:, ::-1], jnp.zeros((n, 2, 4))], 1),
            "stacked": jnp.stack([x, x], 1),
            "tiled": jnp.tile(x, (1, 2, 1)),
            "repeated": jnp.repeat(x, 3, axis=1),
            "padded": jnp.pad(x, ((0, 0), (2, 1), (0, 0)), constant_values=3),
            "reflected": jnp.pad(x, ((0, 0), (0, 0), (1, 2)), mode="reflect"),
            "cut": lax.pad(x, 0.5, ((0, 0, 0), (-1, 2, 0), (1, -1, 2))),
            "spaced": lax.pad(x, 0.5, ((0, 0, 1), (0, 0, 2), (0, 0, 0))),
            "rolled": jnp.roll(x, 1, 1),
            "last": x[:, -1],
            "every other": x[:, ::2, 1::2],
            "halves": jnp.split(x, 2, -1),
            "mask": jnp.tril(jnp.ones((m, m))),
            "numbers": jnp.arange(n * 2) + m,
            "eye": jnp.eye(m),
            "hot": jax.nn.one_hot(jnp.arange(m), 5),
            "size": jnp.float32(n) / m,
            "full": jnp.full((n, 3), 7, jnp.int32),
            "line": jnp.linspace(0, 1, m + 2),
        }

    calls = [(random(n, m, 4),) for n, m in ((1, 2), (3, 5))]
    check(path, run, *calls, specs=(spec("n, m, 4"),), rtol=1e-5)


def test_sizes_are_calculated_as_jax_does(path):
    def run(x):
        n, m = x.shape[0] // 2, x.shape[1]
        return [jnp.zeros((n * 8, (m - 3) // 2 + 1)), jnp.ones((m % 3 + 1, m**2, 2 * n - 1))]

    calls = [(random(n, m),) for n, m in ((2, 8), (4, 9), (6, 11))]
    check(path, run, *calls, specs=(spec("2*n, length + 6"),))


def test_dynamic_slices(path):
    def run(x, at):
        cache = jnp.zeros((x.shape[0], 6, 3))
        return {
            "slice": lax.dynamic_slice(x, (0, at, 0), (x.shape[0], 2, 3)),
            "row": lax.dynamic_index_in_dim(x, at, 1),
            "update": lax.dynamic_update_slice(cache, x[:, :2], (0, at, 0)),
            "both": lax.dynamic_update_slice(cache, x[:, :2, :2], (0, at, at)),
            "negative": x[:, at - 3],
        }

    calls = [(random(2, 5, 3), np.int32(at)) for at in (0, 2, 4, 9)]
    check(path, run, *calls, specs=(spec("n, 5, 3"), spec("", "int32")))


def test_reductions(path):
    def run(x, flags):
        return {
            "sum": x.sum(),
            "sums": x.sum((0, 2)),
            "mean": x.mean(-1),
            "max": x.max(1),
            "min": x.min((1, 2)),
            "prod": x.prod(-1),
            "var": x.var(1),
            "argmax": x.argmax(-1),
            "argmin": x.argmin(1),
            "all": flags.all(0),
            "any": flags.any(-1),
            "parity": lax.reduce_xor(flags, (1,)),
            "cumsum": jnp.cumsum(x, 1),
            "backwards": lax.cumsum(x, 2, reverse=True),
            "cumprod": jnp.cumprod(x, 1),
            "cummax": lax.cummax(x, 1),
            "cummin": lax.cummin(x, 2, reverse=True),
            "cumlogsumexp": lax.cumlogsumexp(x, 1),
            "count": flags.sum(-1),
        }

    first = random(3, 4, 5)
    bad = first.copy()
    bad[0, 1, 2] = np.nan
    flags = random(3, 4) > 0
    specs = (spec("n, m, 5"), spec("n, m", "bool"))
    check(path, run, (first, flags), (bad, flags), specs=specs, rtol=1e-4)


def test_ties_and_nan_in_extremes(path):
    x = np.array([[1, 3, 3, -np.inf], [np.nan, 1, np.nan, 2], [0, 0, 0, 0]], np.float32)

    def run(x):
        return {
            "argmax": x.argmax(-1),
            "argmin": x.argmin(-1),
            "sorted": jnp.sort(x, -1),
            "order": jnp.argsort(x, -1),
            "down": jnp.argsort(x, -1, descending=True),
            "top": lax.top_k(x, 3),
            "first": jnp.sort(x, 0),
            "pairs": lax.sort((jnp.round(x), x), num_keys=2),
            "median": jnp.median(x, -1),
            "ranks": jnp.searchsorted(jnp.sort(x[2]), x[0]),
        }

    check(path, run, (x,), specs=(spec("n, 4"),))


def test_products(path):
    def run(x, w, whole):
        return {
            "dense": x @ w,
            "vector": x @ w[:, 0],
            "dot": x[0, 0] @ w[:, 0],
            "heads": jnp.einsum(
                "bihd,bjhd->bhij", x.reshape(*x.shape[:2], 2, 2), x.reshape(*x.shape[:2], 2, 2)
            ),
            "outer": jnp.einsum("bi,bj->bij", x[:, 0], x[:, 0]),
            "all": jnp.einsum("bij,bij->b", x, x),
            "many": jnp.einsum("bij,jk,kl->bil", x, w, w.T),
            "tensordot": jnp.tensordot(w.T, x, ((1,), (2,))),
            "whole": whole @ whole.T,
            "true": (whole > 40) @ (whole < 90).T,
            "wide": lax.dot_general(
                whole, whole, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
            ),
        }

    whole = np.arange(12, dtype=np.int8).reshape(3, 4) * 11
    specs = (spec("n, m, 4"), spec("4, 3"), spec("k, 4", "int8"))
    check(path, run, (random(2, 3, 4), random(4, 3), whole), specs=specs, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_convolutions(path, dtype):
    def conv(x, kernel, **settings):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **settings)

    def run(x, w):
        x, w = x.astype(dtype), w.astype(dtype)
        kernel = w.reshape(3, 3, 2, 4)
        found = {
            "same": conv(x, kernel, window_strides=(1, 1), padding="SAME"),
            "strided": conv(x, kernel, window_strides=(2, 2), padding="SAME"),
            "dilated": conv(x, kernel, window_strides=(1, 1), padding="VALID", rhs_dilation=(2, 1)),
            "transposed": conv(
                x, kernel, window_strides=(1, 1), padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)
            ),
            "grouped": conv(
                x,
                w.reshape(3, 3, 1, 8),
                window_strides=(1, 1),
                padding="SAME",
                feature_group_count=2,
            ),
            "cut": conv(x, kernel, window_strides=(1, 1), padding=((-1, 0), (0, -1))),
            "line": lax.conv_general_dilated(
                x[:, :, 0],
                w.reshape(9, 2, 4),
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
            ),
        }
        return {name: each.astype(jnp.float32) for name, each in found.items()}

    w = np.round(random(3, 3, 2, 4) * 2)
    calls = [(np.round(random(n, h, 6, 2) * 2), w) for n, h in ((1, 7), (2, 8))]
    check(path, run, *calls, specs=(spec("n, h, 6, 2"), spec("3, 3, 2, 4")), rtol=2e-2, atol=1e-2)


def test_windows(path):
    def run(x):
        window = {"window_dimensions": (1, 3, 2), "window_strides": (1, 2, 1), "padding": "SAME"}
        return {
            "max": lax.reduce_window(x, -jnp.inf, lax.max, **window),
            "min": lax.reduce_window(x, jnp.inf, lax.min, **window),
            "sum": lax.reduce_window(x, 0.0, lax.add, **window),
            "prod": lax.reduce_window(x, 1.0, lax.mul, **window),
            "dilated": lax.reduce_window(
                x, -jnp.inf, lax.max, (1, 2, 2), (1, 1, 1), "VALID", window_dilation=(1, 2, 1)
            ),
        }

    bad = random(2, 6, 5)
    bad[0, 2, 2] = np.nan
    check(path, run, (random(3, 7, 5),), (bad,), specs=(spec("n, h, 5"),))


def test_gathers(path):
    def run(x, at):
        return {
            "rows": x[at],
            "columns": x[:, at],
            "both": x[at, at],
            "elements": x[jnp.arange(x.shape[0])[:, None], at[None]],
            "take": jnp.take(x, at, axis=1),
            "filled": jnp.take(x, at + 2, axis=1, mode="fill", fill_value=-1),
            "clipped": jnp.take(x, at + 2, axis=1, mode="clip"),
            "wrapped": jnp.take(x, at - 5, axis=1, mode="wrap"),
            "along": jnp.take_along_axis(x, at[None, :, None] % x.shape[1], axis=1),
            "windows": jax.vmap(lambda i: lax.dynamic_slice(x, (0, i, 0), (1, 2, 3)))(at),
            "each": jax.vmap(lambda row, i: row[i])(x, at[:3]),
            "per row": jax.vmap(lambda row, i: lax.dynamic_slice(row, (i, 0), (2, 3)))(x, at[:3]),
            "picked": x[:, 1, at % 3],
            "corner": x[..., -1, ::2],
        }

    at = np.array([0, 2, 1, 2], np.int32)
    check(path, run, (random(3, 4, 3), at), specs=(spec("3, 4, 3"), spec("4", "int32")))
    at = np.array([0, 2, 1, 2, 0], np.int32)

    def symbolic(x, at):
        return [x[at], x[:, at], jnp.take_along_axis(x, at[:, None, None], 1), x[at, at], x[0]]

    check(
        path.with_suffix(".2"),
        symbolic,
        (random(5, 4, 3), at),
        specs=(spec("n, 4, 3"), spec("n", "int32")),
    )


def test_scatters(path):
    def run(x, at, new):
        count = x.shape[0]
        return {
            "set": x.at[:, 1].set(5.0),
            "rows": x.at[at].set(new[:, None]),
            "add": x.at[at].add(new[:, None]),
            "outside": x.at[at + 1].add(new[:, None], mode="drop"),
            "mul": x.at[:, at].multiply(2.0),
            "max": x.at[at].max(0.5),
            "min": x.at[at, at].min(0.0),
            "sub": x.at[at, 1].add(-new),
            "points": x.at[at, at].add(new[:, : x.shape[2]]),
            "segments": jax.ops.segment_sum(new, at, count),
            "largest": jax.ops.segment_max(new, at, count),
            "histogram": jnp.bincount(at, length=5),
            "each": jax.vmap(lambda row, i: row.at[i].set(0.0))(x, at[:3]),
            "each added": jax.vmap(lambda row, i: row.at[i].add(1.0))(x, at[:3]),
            "block": x.at[:, 1:3].set(0.0),
            "flags": (x > 0).at[at].set(True),
        }

    at = np.array([0, 2, 1, 2], np.int32)
    specs = (spec("3, 4, 3"), spec("4", "int32"), spec("4, 3"))
    check(path, run, (random(3, 4, 3), at, random(4, 3)), specs=specs)

    def symbolic(x, at):
        return [x.at[at].add(x), x.at[:, 1].set(2.0), x.at[at, at].max(0.1), x.at[0].set(1.0)]

    at = np.array([0, 2, 1, 2, 0], np.int32)
    specs = (spec("n, 4, 3"), spec("n", "int32"))
    check(path.with_suffix(".2"), symbolic, (random(5, 4, 3), at), specs=specs)


def test_many_updates_of_one_place_are_all_added(path):
    def run(x, at):
        return jax.ops.segment_sum(x, at, 3)

    at = np.random.default_rng(0).integers(0, 3, 20000)
    x = np.ones((20000, 2), np.float32)
    check(path, run, (x, at.astype(np.int32)), specs=(spec("n, 2"), spec("n", "int32")))


def test_loops_and_branches(path):
    def run(x, count):
        def step(state, row):
            return state * 0.5 + row, (state, row.sum())

        start = jnp.zeros(x.shape[1:])
        return {
            "scan": lax.scan(step, start, x),
            "reverse": lax.scan(step, start, x, reverse=True),
            "without": lax.fori_loop(0, 3, lambda i, y: y * 1.1 + i, x),
            "counted": lax.fori_loop(0, count, lambda i, y: y + x.shape[0], x),
            "while": lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, s[1] * 2), (0, x)),
            "each": jax.vmap(
                lambda y: lax.while_loop(
                    lambda s: s[0].sum() < count, lambda s: (s[0] + 1, s[1] * 2), (y, y)
                )
            )(x),
            "cond": lax.cond(count > 2, lambda y: y * 2, lambda y: y, x),
            "switch": lax.switch(count, [lambda y: y, lambda y: y + 1, lambda y: y * 3], x),
            "nested": lax.map(
                lambda row: lax.cond(row.sum() > 0, lambda r: r, lambda r: -r, row), x
            ),
            "platform": lax.platform_dependent(x, cpu=lambda y: y + 1, default=lambda y: y + 1),
            "associative": lax.associative_scan(jnp.add, x[:, :3], axis=1),
            "all but one": lax.scan(step, start, x[1:], reverse=True),
            "products": jnp.cumprod(x[1:], 0),
            "captured": lax.scan(lambda c, _: (c + x.sum(), None), 0.0, None, length=4)[0],
        }

    calls = [(random(n, 3), np.int32(count)) for n, count in ((1, 0), (4, 5))]
    check(path, run, *calls, specs=(spec("n, 3"), spec("", "int32")), rtol=1e-5)


def test_complex_numbers(path):
    def run(x):
        z = lax.complex(x, x[::-1] + 1)
        found = {
            "product": z * z,
            "quotient": z / (z + 2),
            "exp": jnp.exp(z * 0.1),
            "conj": z.conj(),
            "mat": z @ z.T,
            "sum": z.sum(-1),
            "turned": z.T[::-1],
            "chosen": jnp.where(x > 0, z, -z),
            "looped": lax.fori_loop(0, 3, lambda i, y: y * z, z),
            "power": z**3,
            "sqrt": jnp.sqrt(z),
        }
        parts = {name: (each.real, each.imag) for name, each in found.items()}
        return parts | {"abs": jnp.abs(z), "angle": jnp.angle(z), "log": jnp.log(z).real}

    check(path, run, (random(3, 4),), specs=(spec("n, 4"),), rtol=1e-4, atol=1e-5)


def test_transforms_of_fourier(path):
    def run(x):
        found = {
            "rfft": jnp.fft.rfft(x),
            "fft": jnp.fft.fft(x, axis=1),
            "two": jnp.fft.fft2(x),
            "rtwo": jnp.fft.rfft2(x),
            "long": jnp.fft.rfft(jnp.pad(x, ((0, 0), (0, 0), (0, 1000)))),
        }
        parts = {name: (each.real, each.imag) for name, each in found.items()}
        return parts | {
            "back": jnp.fft.irfft(jnp.fft.rfft(x)),
            "odd": jnp.fft.irfft(jnp.fft.rfft(x), 5),
            "back of two": jnp.fft.irfft2(jnp.fft.rfft2(x)),
            "ifft": jnp.fft.ifft(jnp.fft.fft(x)).real,
        }

    check(path, run, (random(3, 4, 6),), specs=(spec("n, 4, 6"),), rtol=1e-4, atol=1e-4)


def test_random_numbers_are_those_of_jax(path):
    def run(seed, x):
        key = jax.random.key(seed)
        one, two = jax.random.split(key)
        raw = jax.random.PRNGKey(3)
        return {
            "uniform": jax.random.uniform(one, (3, 5)),
            "normal": jax.random.normal(two, (4,)),
            "fold": jax.random.uniform(jax.random.fold_in(key, 7)),
            "bits": jax.random.bits(raw, (3,)),
            "ints": jax.random.randint(one, (6,), 0, 10),
            "chance": jax.random.bernoulli(two, 0.3, (7,)),
            "data": jax.random.key_data(jax.random.split(key, 3)),
            "each": jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(key, 3)),
            "loop": lax.fori_loop(
                0,
                3,
                lambda i, s: (s[0] + jax.random.uniform(s[1]), jax.random.split(s[1])[0]),
                (0.0, key),
            )[0],
            "category": jax.random.categorical(one, x),
        }

    specs = (spec("", "int32"), spec("4, 3"))
    check(path, run, (np.int32(5), random(4, 3)), specs=specs, rtol=1e-4, atol=1e-5)


def test_linear_algebra(path):
    def run(x, b):
        spd = x @ x.mT + 2 * jnp.eye(3)
        low = jnp.linalg.cholesky(spd)
        q, r = jnp.linalg.qr(x)
        return {
            "cholesky": low,
            "solve": jnp.linalg.solve(x, b),
            "triangular": jax.scipy.linalg.solve_triangular(low, b, lower=True),
            "transposed": jax.scipy.linalg.solve_triangular(low, b, lower=True, trans=1),
            "cho": jax.vmap(
                lambda s, y: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(s), True), y)
            )(spd, b),
            "det": jnp.linalg.det(x),
            "slogdet": jnp.linalg.slogdet(x)[1],
            "inv": jnp.linalg.inv(x),
            "q": q,
            "r": r,
            "eigenvalues": jnp.linalg.eigvalsh(spd),
            "singular": jnp.linalg.svd(x, compute_uv=False),
            "pinv": jnp.linalg.pinv(x),
            "tall": jnp.linalg.qr(x[:, :, :2])[1],
        }

    check(
        path,
        run,
        (random(2, 3, 3), random(2, 3, 2)),
        specs=(spec("n, 3, 3"), spec("n, 3, 2")),
        rtol=2e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("kind", ["float32", "int32", "bool", "float32 with nan"])
def test_orders_do_not_depend_on_what_top_k_does_with_equal_numbers(tmp_path, kind):
    """A runtime may keep their order, as ONNX says, or not: each key is another number."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops.op_topk import TopK_11

    class Turned(TopK_11):
        """Of equal numbers the last one first."""

        op_domain = ""

        def _run(self, x, k, axis=None, largest=None, sorted=None):
            sign = -1 if largest else 1
            keys = np.flip(sign * x.astype(np.float64), axis)
            order = x.shape[axis] - 1 - np.argsort(keys, axis, kind="stable")
            index = np.take(order, np.arange(int(k[0])), axis)
            return np.take_along_axis(x, index, axis), index

    Turned.__name__ = "TopK"
    x = np.array([[2, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0], [1, 1, 2, 2, 0, 0]])
    x = x > 0 if kind == "bool" else x.astype(kind.split()[0])
    if "nan" in kind:
        x[:, 1::3] = np.nan

    def model(x):
        key = x.astype(jnp.int32) if kind == "bool" else x
        return jax.lax.top_k(key, 4)[1], jnp.argsort(x, axis=1), jnp.sort(x, axis=0)

    to_onnx(model, tmp_path / "m.onnx", spec("n, 6", str(x.dtype)))
    run = ReferenceEvaluator(str(tmp_path / "m.onnx"), new_ops=[Turned]).run
    for got, expected in zip(run(None, {"x": x}), model(x)):
        np.testing.assert_array_equal(got, expected)
