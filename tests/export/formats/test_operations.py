"""Each family of operations of jax, written for ONNX, TFLite and TensorFlow, and run by each.

The numbers have NaN, infinities, ties, zeros of both signs and the ends of their dtypes.
"""

from functools import partial
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from pax_export.export import (
    load,
    spec,
    symbolic_numpy,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
)
from tests.closeness import assert_close

ODD = np.array([[0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, 0.5, -7.0, 7.0]], np.float32)
SPECIAL = np.array(
    [
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5],
        [np.nan, np.inf, -np.inf, 3e9, -3e9, 1e-6],
        [2.5, -2.5, 1.5, 1.5, 100.0, -100.0],
    ],
    np.float32,
)
WHOLE = np.array([[0, 1, -1, 7, 7, -8, 2**31 - 1, -(2**31), 65, 12]], np.int32)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows(array, count):
    return np.concatenate([np.roll(array, 3 * step, -1) for step in range(count)])


RUNTIMES, PLAIN = ("onnx", "tflite", "tensorflow"), ("plain.onnx", "tflite", "tensorflow")
WRITERS = {"onnx": partial(to_onnx, exact=True), "plain.onnx": to_onnx, "tflite": to_tflite}
WRITERS |= {"saved_model": to_saved_model, "stablehlo": to_stablehlo}
WRITERS["tensorflow"] = partial(to_saved_model, operations="tensorflow")


@pytest.fixture
def check(tmp_path):
    def run(function, *calls, specs, rtol=1e-5, atol=1e-6, lacks=None, targets=RUNTIMES):
        compiled = jax.jit(function)
        expected = [jax.tree.map(np.asarray, compiled(*arrays)) for arrays in calls]
        for target in targets:
            left = partial(without, (lacks or {}).get(target, ()))
            path = tmp_path / f"model.{target}"
            model = ({}, lambda _, *args, left=left: left(function(*args)))
            WRITERS[target](model, path, specs, validate=False, overwrite=True)
            loaded = load(path)
            for arrays, wanted in zip(calls, map(left, expected)):
                compare(target, loaded(*arrays), wanted, rtol, atol)

    return run


def without(names, found):
    return {name: x for name, x in found.items() if name not in names} if names else found


def compare(target, found, wanted, rtol, atol):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    places = jax.tree_util.tree_leaves_with_path(found)
    for (place, one), other in zip(places, jax.tree.leaves(wanted)):
        name = f"{target}: {jax.tree_util.keystr(place)}"
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        assert_close(one, other, rtol=rtol, atol=atol, where=name)


def test_arithmetic_of_floats(check):
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
            "compared": [x < y, x <= y, x == y, x != y, x > y, x >= y],
            "mixed": jax.nn.leaky_relu(x) + jnp.nan_to_num(x),
            "square": lax.square(x),
            "negative": -jnp.abs(x),
            "where": jnp.where(x > y, x, y),
            "bools": jnp.where(x > y, x < 1, y < 1),
            "select": lax.select_n(jnp.int32(y > 0) + jnp.int32(y > 1), x, y, x * 2),
            "logical": (x > 0) & ~(y > 0) | (x == y) ^ (x < y),
        }

    calls = [(rows(ODD, n), random(n, 10, seed=n)) for n in (1, 3)]
    check(run, *calls, specs=(spec("batch, 10"), spec("batch, 10")))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint8", "int16"])
def test_arithmetic_of_whole_numbers(check, dtype):
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
            "by eight": [x // 8, x % 8],
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
            "floats": [x.astype(jnp.float32), x.astype(jnp.float16)],
            "narrow": [x.astype(jnp.int8) * jnp.int8(3), x.astype(jnp.uint16) + 9],
            "reduced": [jnp.sum(x, -1), x.max(1), x.min(0)],
            "sorted": jnp.sort(x, -1),
        }

    x = rows(WHOLE, 3).astype(dtype)
    y = np.roll(x, 1, -1)
    lacks = {"tflite": ("div",) if dtype == "uint32" else ()}  # by numbers of calls
    check(run, (x, y), specs=(spec("batch, 10", dtype), spec("batch, 10", dtype)), lacks=lacks)


def test_functions(check):
    names = "exp sin cos tan tanh log1p expm1 exp2 cbrt arctan sinh cosh arcsinh"

    def run(x, y):
        return {name: getattr(jnp, name)(x) for name in names.split()} | {
            "log": jnp.log(y),
            "log2": jnp.log2(y),
            "sqrt": jnp.sqrt(y),
            "rsqrt": lax.rsqrt(y),
            "acosh": jnp.arccosh(1 + y),
            "sigmoid": jax.nn.sigmoid(x),
            "gelu": jax.nn.gelu(x),
            "softplus": jax.nn.softplus(x),
            "erf": [lax.erf(x), lax.erfc(x), lax.erf(x * 1e-4)],
            "unit": [f(jnp.tanh(x)) for f in (lax.asin, lax.acos, lax.atanh)],
            "erf_inv": lax.erf_inv(jnp.tanh(x)),
            "lgamma": lax.lgamma(x * 3),
            "digamma": lax.digamma(jnp.abs(x) + 0.1),
            "atan2": jnp.arctan2(x, y - 1),
            "small": jnp.expm1(x * 1e-6) * 1e6,
            "log of small": jnp.log1p(x * 1e-6) * 1e6,
            "logsumexp": jax.nn.logsumexp(x, -1),
        }

    calls = [(random(n, 5), np.abs(random(n, 5, seed=1))) for n in (1, 4)]
    check(run, *calls, specs=(spec("n, 5"), spec("n, 5")), rtol=1e-4, atol=1e-5)


def test_functions_of_nan_and_infinity(check):
    """Kernels differ with the processor, most of all in what they make of NaN."""
    names = "exp log exp2 expm1 log1p sinh cosh asinh acosh atanh erf erfc sqrt cbrt logistic tanh"

    def run(x):
        found = {name: getattr(lax, name)(x) for name in names.split()}
        return found | {f.__name__: f(x) for f in (jnp.log2, jax.nn.softplus, jax.nn.mish)}

    check(run, (SPECIAL,), specs=spec("b, 6"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "bool", "int32"])
def test_inputs_and_outputs_of_each_dtype(check, dtype):
    x = np.asarray(jnp.asarray(WHOLE % 3, dtype))
    check(lambda x: [x, x, jnp.concatenate([x, x], 1)], (x,), specs=spec("b, 10", dtype))


def test_conversions(check):
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

    check(run, (rows(ODD, 2), rows(WHOLE, 2)), specs=(spec("n, 10"), spec("n, 10", "int32")))


def test_shapes_of_symbolic_size(check):
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
            "cuts": [x[:, -1], x[0], x[1:], x[:-1], x[:, None][:, 0]],
            "moved by vmap": jax.vmap(lambda r: r[:, None] * r[None], 0, 1)(x),
            "six axes": x.reshape(n, 1, m, 2, 1, 2).transpose(4, 0, 2, 1, 5, 3)
            * jnp.arange(2.0).reshape(1, 1, 1, 1, 2, 1),
            "differences": [jnp.diff(x, axis=1), jnp.trace(x, axis1=1, axis2=2)],
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
    check(run, *calls, specs=(spec("n, m, 4"),), rtol=1e-5)


def test_sizes_are_calculated_as_jax_does(check):
    def run(x):
        n, m = x.shape[0] // 2, x.shape[1]
        return [jnp.zeros((n * 8, (m - 3) // 2 + 1)), jnp.ones((m % 3 + 1, m**2, 2 * n - 1))]

    calls = [(random(n, m),) for n, m in ((2, 8), (4, 9), (6, 11))]
    check(run, *calls, specs=(spec("2*n, length + 6"),))


def test_reductions(check):
    def run(x, flags):
        return {
            "sum": x.sum(),
            "sums": x.sum((0, 2)),
            "over no axis": x.sum(()),
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
            "bits": [f((x * 99).astype(jnp.int32), (2,)) for f in of_bits],
            "cumsum": jnp.cumsum(x, 1),
            "backwards": lax.cumsum(x, 2, reverse=True),
            "cumprod": jnp.cumprod(x, 1),
            "cummax": lax.cummax(x, 1),
            "cummin": lax.cummin(x, 2, reverse=True),
            "cumlogsumexp": lax.cumlogsumexp(x, 1),
            "count": flags.sum(-1),
        }

    of_bits = lax.reduce_and, lax.reduce_or, lax.reduce_xor
    first = random(3, 4, 5)
    bad = first.copy()
    bad[0, 1, 2] = np.nan
    flags = random(3, 4) > 0
    specs = (spec("n, m, 5"), spec("n, m", "bool"))
    check(run, (first, flags), (bad, flags), specs=specs, rtol=1e-4)


def test_ties_and_nan_in_extremes(check):
    x = np.array([[1, 3, 3, -np.inf], [np.nan, 1, np.nan, 2], [0, 0, 0, 0]], np.float32)

    def run(x):
        return {
            "argmax": x.argmax(-1),
            "argmin": x.argmin(-1),
            "sorted": jnp.sort(x, -1),
            "order": jnp.argsort(x, -1),
            "down": jnp.argsort(x, -1, descending=True),
            "top": [lax.top_k(x, 3), lax.approx_max_k(x, 2)],
            "softmax": jax.nn.softmax(x, -1),
            "first": jnp.sort(x, 0),
            "flags": lax.sort((x > 0, x), num_keys=2),
            "pairs": lax.sort((jnp.round(x), x), num_keys=2),
            "median": jnp.median(x, -1),
            "ranks": jnp.searchsorted(jnp.sort(x[2]), x[0]),
        }

    check(run, (x,), specs=(spec("n, 4"),))


def test_products(check):
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
    check(run, (random(2, 3, 4), random(4, 3), whole), specs=specs, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_convolutions(check, dtype):
    def conv(x, kernel, strides=(1, 1), padding="SAME", **settings):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers, **settings
        )

    def run(x, w):
        x, w = x.astype(dtype), w.astype(dtype)
        kernel = w.reshape(3, 3, 2, 4)
        numbers = ("NWC", "WIO", "NWC")
        found = {
            "same": conv(x, kernel),
            "strided": conv(x, kernel, (2, 2)),
            "dilated": conv(x, kernel, padding="VALID", rhs_dilation=(2, 1)),
            "transposed": conv(x, kernel, padding=((1, 2), (2, 1)), lhs_dilation=(2, 2)),
            "grouped": conv(x, w.reshape(3, 3, 1, 8), feature_group_count=2),
            "cut": conv(x, kernel, padding=((-1, 0), (0, -1))),
            "line": lax.conv_general_dilated(
                x[:, :, 0], w.reshape(9, 2, 4), (1,), "SAME", dimension_numbers=numbers
            ),
        }
        return {name: each.astype(jnp.float32) for name, each in found.items()}

    w = np.round(random(3, 3, 2, 4) * 2)
    calls = [(np.round(random(n, h, 6, 2) * 2), w) for n, h in ((1, 7), (2, 8))]
    targets = ("onnx", "tensorflow") if dtype == "int8" else RUNTIMES  # TFLite convolves floats
    specs = (spec("n, h, 6, 2"), spec("3, 3, 2, 4"))
    check(run, *calls, specs=specs, rtol=2e-2, atol=1e-2, targets=targets)


def test_convolutions_of_known_sizes(check):
    kernel, line = random(3, 3, 4, 6), random(3, 4, 5)

    def run(x):
        numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        one = {"dimension_numbers": ("NHC", "HIO", "NHC")}
        return {
            "transposed": lax.conv_transpose(x, kernel, (2, 2), "SAME"),
            "more": lax.conv_transpose(x, kernel, (2, 3), "VALID"),
            "groups": lax.conv_general_dilated(
                x, kernel[:, :, :2], (1, 2), "SAME", feature_group_count=2, **numbers
            ),
            # TensorFlow fuses it with the sum, and then aborts with explicit padding.
            "depthwise": np.arange(4, dtype=np.float32)
            + lax.conv_general_dilated(
                x, line[:, :, None, :4], (1, 1), [(2, 0), (1, 2)], feature_group_count=4, **numbers
            ),
            "causal": lax.conv_general_dilated(
                x[:, 0], line, (2,), [(4, 0)], rhs_dilation=(2,), **one
            ),
            "channels first": lax.conv_general_dilated(x, np.ones((2, 8, 3, 3)), (1, 1), "SAME"),
            "pool": lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
            "products": [
                jnp.tensordot(x, x, ((1, 2, 3), (1, 2, 3))),
                jnp.einsum("bhwc,hd->bdwc", x, x[0, :, 0]),
            ],
        }

    calls = [(random(n, 8, 8, 4),) for n in (1, 2)]
    check(run, *calls, specs=spec("n, 8, 8, 4"), rtol=1e-4, atol=1e-5)


def test_windows(check):
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
    check(run, (random(3, 7, 5),), (bad,), specs=(spec("n, h, 5"),))


def test_gathers(check):
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

    calls = [(random(3, 4, 3), np.array(at, np.int32)) for at in ([0, 2, 1, 2], [-1, 9, 1, -9])]
    check(run, *calls, specs=(spec("3, 4, 3"), spec("4", "int32")))
    at = np.array([0, 2, 1, 2, 0], np.int32)

    def symbolic(x, at):
        return [x[at], x[:, at], jnp.take_along_axis(x, at[:, None, None], 1), x[at, at], x[0]]

    check(symbolic, (random(5, 4, 3), at), specs=(spec("n, 4, 3"), spec("n", "int32")))


def test_scatters(check):
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

    specs = (spec("3, 4, 3"), spec("4", "int32"), spec("4, 3"))
    calls = [np.array(at, np.int32) for at in ([0, 2, 1, 2], [-1, 9, 1, 1])]
    check(run, *((random(3, 4, 3), at, random(4, 3)) for at in calls), specs=specs)

    def symbolic(x, at):
        return [x.at[at].add(x), x.at[:, 1].set(2.0), x.at[at, at].max(0.1), x.at[0].set(1.0)]

    at = np.array([0, 2, 1, 2, 0], np.int32)
    specs = (spec("n, 4, 3"), spec("n", "int32"))
    check(symbolic, (random(5, 4, 3), at), specs=specs)


def test_loops_of_vmap_in_each_other(check):
    """More than `decompose` follows an operation into itself."""

    def nested(depth, x):
        if not depth:
            return x * 1.5 + 1
        turn = lambda s: (s[0] + jnp.where(s[1] > 9, 1, 2), nested(depth - 1, s[1]))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 3, turn, (0, x))[1]

    run = jax.vmap(lambda x: nested(5, x))
    check(run, (np.array([0, 1, 20, 60], np.float32),), specs=(spec("n"),))


def test_nan_in_scattered_extremes(check):
    def run(x, at, new):
        largest = jax.ops.segment_max(new, at, 3), jax.ops.segment_min(new, at, 3)
        return *largest, x.at[at].max(new), x.at[at + 1].min(new, mode="drop")

    x, new = random(3, 2), random(5, 2)
    x[0, 1] = new[1, 0] = new[2] = np.nan
    at = np.array([2, 0, 0, 1, 1], np.int32)
    check(run, (x, at, new), specs=(spec("3, 2"), spec("n", "int32"), spec("n, 2")))


def test_many_updates_of_one_place_are_all_added(check):
    def run(x, at):
        return jax.ops.segment_sum(x, at, 3)

    at = np.random.default_rng(0).integers(0, 3, 20000)
    x = np.ones((20000, 2), np.float32)
    check(run, (x, at.astype(np.int32)), specs=(spec("n, 2"), spec("n", "int32")))


def test_loops_and_branches(check):
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
            "gradient": jax.grad(lambda x: jnp.sum(jnp.sin(x) * jax.nn.logsumexp(x, -1)[:, None]))(
                x
            ),
            "captured": lax.scan(lambda c, _: (c + x.sum(), None), 0.0, None, length=4)[0],
        }

    calls = [(random(n, 3), np.int32(count)) for n, count in ((1, 0), (4, 5))]
    lacks = {"tflite": ("all but one", "products")}  # of no rows, where n is 1
    check(run, *calls, specs=(spec("n, 3"), spec("", "int32")), lacks=lacks)


def test_complex_numbers(check):
    def run(x):
        z = lax.complex(x, x[::-1] + 1)
        found = {
            "product": z * z,
            "quotient": z / (z + 2),
            "mat": z @ z.T,
            "turned": z.T[::-1],
            "looped": lax.fori_loop(0, 3, lambda i, y: y * z, z),
        }
        parts = {name: (each.real, each.imag) for name, each in found.items()}
        return parts | {"abs": jnp.abs(z), "angle": jnp.angle(z)}

    # The parts are tested in jax alone, as are Fourier transforms, keys and decompositions below.
    check(
        run,
        (random(3, 4),),
        specs=(spec("n, 4"),),
        rtol=1e-4,
        atol=1e-5,
        targets=("onnx", "tensorflow"),
    )


def test_transforms_of_fourier(check):
    def run(x):
        found = {
            "rfft": jnp.fft.rfft(x),
            "fft": jnp.fft.fft(x, axis=1),
            "two": jnp.fft.fft2(x),
            "rtwo": jnp.fft.rfft2(x),
            "planes": jnp.fft.fft2(jnp.tile(x, (1, 3, 2))[..., :11]),
            "long": jnp.fft.rfft(jnp.pad(x, ((0, 0), (0, 0), (0, 1000)))),
        }
        parts = {name: (each.real, each.imag) for name, each in found.items()}
        return parts | {
            "back": jnp.fft.irfft(jnp.fft.rfft(x)),
            "odd": jnp.fft.irfft(jnp.fft.rfft(x), 5),
            "back of two": jnp.fft.irfft2(jnp.fft.rfft2(x)),
            "ifft": jnp.fft.ifft(jnp.fft.fft(x)).real,
        }

    options = {
        "rtol": 1e-4,
        "atol": 1e-4,
        "targets": ("onnx", "tensorflow"),
    }  # which has an operator
    check(run, (random(3, 4, 6),), specs=(spec("n, 4, 6"),), **options)


def test_random_numbers_are_those_of_jax(check):
    def run(seed, x):
        key = jax.random.key(seed)
        one, two = jax.random.split(key)
        raw = jax.random.PRNGKey(3)
        return {
            "normal": jax.random.normal(two, (4,)),
            "bits": jax.random.bits(raw, (3,)),
            "wrapped": jax.random.bits(
                jax.random.wrap_key_data(jnp.uint32([2**32 - 1, 5]) + x[0, 0].astype(jnp.uint32)),
                (3,),
            ),
            "data": jax.random.key_data(jax.random.split(key, 3)),
            "loop": lax.fori_loop(
                0,
                3,
                lambda i, s: (s[0] + jax.random.uniform(s[1]), jax.random.split(s[1])[0]),
                (0.0, key),
            )[0],
            "category": jax.random.categorical(one, x),
        }

    specs = (spec("", "int32"), spec("4, 3"))
    options = {"rtol": 1e-4, "atol": 1e-5, "targets": ("tflite", "tensorflow")}
    check(run, (np.int32(5), random(4, 3)), specs=specs, **options)


def test_linear_algebra(check):
    def run(x, b):
        spd = x @ x.mT + 2 * jnp.eye(3)
        low = jnp.linalg.cholesky(spd)
        q, r = jnp.linalg.qr(x)
        return {
            "cholesky": low,
            "solve": jnp.linalg.solve(x, b),
            "triangular": jax.scipy.linalg.solve_triangular(low, b, lower=True),
            "transposed": jax.scipy.linalg.solve_triangular(low, b, lower=True, trans=1),
            "q": q,
            "r": r,
            "eigenvalues": jnp.linalg.eigvalsh(spd),
            "singular": jnp.linalg.svd(x, compute_uv=False),
            "lu": lax.linalg.lu(jnp.concatenate([x, x[:, :1] * jnp.zeros((3, 1))], 0)),
            "not positive": jnp.linalg.cholesky(-spd),
        }

    specs, options = (spec("n, 3, 3"), spec("n, 3, 2")), {"rtol": 2e-3, "atol": 1e-4}
    check(
        run,
        (random(2, 3, 3), random(2, 3, 2)),
        specs=specs,
        targets=("tflite", "tensorflow"),
        **options,
    )


def test_two_operands_that_broadcast_each_other(check):
    """As a table of places and ones of the batch's size: neither has the shape of the result."""
    table = random(1, 7, 5)

    def run(x):
        ones, zeros = jnp.ones((x.shape[0], 1, 1)), jnp.zeros((x.shape[0], 1, 1))
        return {
            "mul": table * ones,
            "div": table / ones,
            "add": zeros + table,
            "max": jnp.maximum(table, zeros),
            "whole": table.astype(jnp.int32) + zeros.astype(jnp.int32),
            "bools": (table > 0) & ones.astype(bool),
            "pairs": x.sum(1)[:, None] * jnp.ones((1, x.shape[0])),
        }

    check(run, (random(2, 3),), (random(1, 3),), specs=spec("batch, 3"))


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


@pytest.mark.parametrize("shape", ["6, 4", "n, 4"])
def test_arrays_without_elements(check, shape):
    def run(x):
        return {name: function(x) for name, function in OF_NONE.items()}

    check(run, (random(6, 4),), specs=spec(shape), rtol=1e-6, targets=PLAIN)


@pytest.mark.parametrize("padded", [0, 1])
def test_padding_of_symbolic_images_is_that_of_operators(check, padded, tmp_path):
    kernel = random(3, 2, 3, 4, seed=1)

    def apply(x):
        x = jnp.pad(x, ((0, 0), (padded, 0), (0, 0), (0, 0)))
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 3, 2, 1), "SAME")

    calls = [(random(2, height, width, 3),) for height, width in ((8, 8), (9, 6), (1, 5))]
    check(apply, *calls, specs=spec("n, h, w, 3"), targets=PLAIN)
    # There is no arithmetic of sizes.
    assert b"Mod" not in (tmp_path / "model.plain.onnx").read_bytes()
    assert b"floor_" not in (tmp_path / "model.tflite").read_bytes()


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_product_that_overflows_is_not_undone(check, dtype):
    three = np.asarray(3, dtype)
    x = np.array([2**30, -5, 7] if dtype == "int32" else [3e38, -5, 7], dtype)

    def run(x):
        return lax.div(lax.mul(x, three), three)

    # TensorFlow's optimizer multiplies by the quotient of both.
    targets = PLAIN if dtype == "int32" else PLAIN[:2]
    check(run, (x,), specs=spec("n", dtype), rtol=0, atol=0, targets=targets)


@pytest.mark.skipif("out_dtype" not in signature(lax.mul).parameters, reason="jax before 0.12")
@pytest.mark.parametrize(("dtype", "wide"), [("int8", "int32"), ("float16", "float32")])
def test_a_product_of_a_wider_dtype(check, dtype, wide):
    x = np.array([1, -2, 100, 127], dtype)
    three = np.asarray(100, dtype)

    def run(x):
        each = partial(lax.mul, out_dtype=wide)
        return {
            "square": each(x, x),
            "of_one": each(x, three),
            "loop": lax.map(lambda y: each(y, y), x),
        }

    check(run, (x,), specs=spec("4", dtype), rtol=0, atol=0, targets=(*PLAIN, "saved_model"))


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


def test_sparse_matrices(check):
    calls = (random(1, 6, 4),), (random(3, 6, 4),)
    targets = (*PLAIN, "saved_model", "stablehlo")
    check(sparse_products, *calls, specs=spec("batch, 6, 4"), targets=targets)


def numbers_of_numpy(x):
    one, two = np.int64(1), np.int64(2)
    sides = (one, two, two, one)
    return {
        "largest": lax.reduce_window(x, -np.inf, lax.max, sides, (one,) * 4, "VALID"),
        "sums": lax.reduce_window(x, 0.0, lax.add, sides, (one,) * 4, "SAME"),
        "power": lax.integer_pow(x, np.int64(3)),
        "in_a_loop": lax.map(lambda row: lax.integer_pow(row, two), x),
    }


def test_parameters_that_are_integers_of_numpy(check):
    targets = (*PLAIN, "saved_model")
    check(numbers_of_numpy, (random(2, 6, 5, 3),), specs=spec("2, 6, 5, 3"), targets=targets)


@pytest.mark.parametrize("factor", [1, 4])
def test_transforms_of_fewer_or_more_frequencies(check, factor):
    def run(x):
        return symbolic_numpy.irfft(x * (1 + 2j), factor * x.shape[1])

    check(run, (random(3, 6),), specs=spec("n, m"), rtol=1e-4, targets=PLAIN)
