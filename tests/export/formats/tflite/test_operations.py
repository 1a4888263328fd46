"""Each rule for an operation, run by LiteRT: with NaN, infinities and ties among the numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, spec, to_tflite
from tests.closeness import assert_close

SPECIAL = np.array(
    [
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5],
        [np.nan, np.inf, -np.inf, 3e9, -3e9, 1e-6],
        [2.5, -2.5, 1.5, 1.5, 100.0, -100.0],
    ],
    np.float32,
)
NORMAL = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
UNIT = np.tanh(NORMAL)
INTEGERS = np.array([[0, 1, -1, 7, -7, 2**31 - 1], [5, 3, 5, -(2**31), 2, 9]], np.int32)


def check(folder, functions, inputs, specs, rtol=None):
    """Exports functions as one model, and compares each with jax."""
    model = ({}, lambda params, *arrays: {n: f(*arrays) for n, f in functions.items()})
    path = folder / "model.tflite"
    to_tflite(model, path, specs, validate=False)
    loaded = load(path)
    in_jax = jax.jit(model[1])  # as one program: each operation alone takes as long to compile
    for arrays in inputs:
        found, wanted = loaded(*arrays), in_jax({}, *arrays)
        for name in functions:
            one, other = jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name])
            assert len(one) == len(other)
            for got, expected in zip(one, other):
                assert got.dtype == expected.dtype, name
                assert_close(got, expected, rtol or 1e-5, 1e-6, where=name)


def test_numbers_one_by_one(tmp_path):
    names = "abs neg sign floor ceil square round exp2 logistic tanh exp is_finite".split()
    functions = {name: getattr(lax, name) for name in names}
    functions |= {
        "relu": jax.nn.relu,
        "max": lambda x: jnp.maximum(x, x[:, ::-1]),
        "min": lambda x: jnp.minimum(x, x[:, ::-1]),
        "clamp": lambda x: jnp.clip(x, -1.0, 1.0),
        "round_even": jnp.round,
        "int32": lambda x: x.astype(jnp.int32),
        "uint8": lambda x: x.astype(jnp.uint8),
        "uint32": lambda x: x.astype(jnp.uint32),
        "bool": lambda x: x.astype(bool),
        "float16": lambda x: x.astype(jnp.float16).astype(jnp.float32),
        "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.75)),
        "compared": lambda x: [x < 0, x <= x[:, ::-1], x == x[0], x != x[0], x > 0, x >= 1.5],
        "chosen": lambda x: lax.select_n((x > 0).astype(jnp.int32), x, -x),
        "mixed": lambda x: jax.nn.leaky_relu(x) + jnp.nan_to_num(x),
    }
    check(tmp_path, functions, [(SPECIAL,), (NORMAL,), (NORMAL[:1],)], spec("b, 6"))


def _of(place, name):
    """A function of jax.lax, of one of several arrays."""
    return lambda *arrays: getattr(lax, name)(arrays[place])


def test_functions_of_nan_and_infinity(tmp_path):
    """LiteRT's kernels differ with the processor, most of all in what they make of NaN."""
    names = "exp log exp2 expm1 log1p sinh cosh asinh acosh atanh erf erfc sqrt cbrt logistic tanh"
    functions = {name: _of(0, name) for name in names.split()}
    functions |= {"log2": jnp.log2, "softplus": jax.nn.softplus, "mish": jax.nn.mish}
    check(tmp_path, functions, [(SPECIAL,)], spec("b, 6"), 1e-5)


def test_functions(tmp_path):
    positive = np.abs(NORMAL) + 0.1
    names = "expm1 log1p sinh cosh asinh erf erfc sin cos tan atan".split()
    functions = {name: _of(0, name) for name in names}
    functions |= {name: _of(1, name) for name in "log sqrt rsqrt cbrt lgamma digamma".split()}
    functions |= {name: _of(2, name) for name in "asin acos atanh erf_inv".split()}
    functions |= {
        "acosh": lambda x, y, z: lax.acosh(1.0 + y),
        "atan2": lambda x, y, z: lax.atan2(x, z[:, :1] * jnp.ones_like(x)),
        "pow": lambda x, y, z: [y**x, x**3, y**-2],
        "small": lambda x, y, z: [lax.expm1(1e-4 * x), lax.log1p(1e-4 * x), lax.erf(1e-4 * x)],
    }
    inputs = [(NORMAL, positive, UNIT), (4 * NORMAL, 9 * positive, 0.1 * UNIT)]
    check(tmp_path, functions, inputs, (spec("b, 6"),) * 3, 1e-4)


def test_integers(tmp_path):
    functions = {
        "divided": lambda x, u: [x // 3, x % 4, lax.div(x, x[:, ::-1]), lax.rem(x, x[:, ::-1])],
        "bits": lambda x, u: [x & 3, x | 8, x ^ 5, ~x, x & x[:, ::-1], x | x[:, ::-1]],
        "shifted": lambda x, u: [x << 2, x >> 1, lax.shift_right_logical(x, 3), x << (x & 7)],
        "unsigned": lambda x, u: [u % u[:1], u + u, u * 3, u < u[:, ::-1], u // 7, u % 10, u >> 4],
        "narrow": lambda x, u: [x.astype(jnp.int8) * jnp.int8(3), x.astype(jnp.uint16) + 9],
        "counted": lambda x, u: [lax.population_count(x), x.sum(1), x.max(1), x.min(0), u.max(1)],
        "floats": lambda x, u: [u.astype(jnp.float32), x.astype(jnp.float16)],
    }
    check(tmp_path, functions, [(INTEGERS, INTEGERS.view(np.uint32))],
          (spec("b, 6", "int32"), spec("b, 6", "uint32")))  # fmt: skip


def test_shapes(tmp_path):
    functions = {
        "slices": lambda x: [x[:, 0], x[:, ::2], x[0], x[-1], x[:, -2:], x[1:], x[:, None, 1:4]],
        "moved": lambda x: [x.T, x[:, ::-1], x[::-1], jnp.roll(x, 1, 0), jnp.roll(x, 2, 1)],
        "padded": lambda x: [
            jnp.pad(x, ((0, 0), (1, 2)), constant_values=3.0),
            lax.pad(x, 0.0, ((1, 0, 0), (-1, 2, 1))),
            jnp.pad(x > 0, ((1, 1), (0, 0))),
        ],
        "joined": lambda x: [jnp.concatenate([x, x], 0), jnp.stack([x, x], 1), jnp.tile(x, (2, 1))],
        "split": lambda x: jnp.split(x, 3, 1),
        "spread": lambda x: [jnp.broadcast_to(x[:, :1], x.shape), jnp.repeat(x, 2, 0), x[:, None]],
        "numbers": lambda x: [jnp.arange(x.shape[0]), x.shape[0] * x, jnp.eye(6)],
        "six_axes": lambda x: x.reshape(-1, 1, 3, 1, 2, 1).transpose(4, 0, 2, 1, 5, 3) * jnp.arange(
            3.0
        ).reshape(1, 1, 3, 1, 1, 1),
        "moved_by_vmap": lambda x: jax.vmap(lambda r: jnp.outer(r, r), 0, 1)(x).reshape(6, -1),
        "most": lambda x: [x[:, :-1], x[:-1], x[:, None][:, 0]],
        "returned": lambda x: [x, x],
        "differences": lambda x: [jnp.diff(x, axis=0), jnp.tril(x), jnp.trace(x)],
    }  # fmt: skip
    check(tmp_path, functions, [(NORMAL,), (NORMAL[:2],)], spec("b, 6"))


def test_reductions_and_order(tmp_path):
    functions = {
        "sums": lambda x: [x.sum(), x.sum(0), x.mean(1), x.prod(1), (x > 0).any(1), (x > 0).all()],
        "largest": lambda x: [x.max(1), x.min(1), x.max(), jnp.argmax(x, 1), jnp.argmin(x, 0)],
        "running": lambda x: [jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, axis=0),
                              lax.cummin(x, axis=1, reverse=True), lax.cumlogsumexp(x, axis=1)],
        "sorted": lambda x: [jnp.sort(x, 1), jnp.argsort(x, 1), jnp.sort(x, 0), jnp.median(x, 1),
                             jnp.argsort(-x[0]), lax.sort((x > 0, x), num_keys=2)[1]],
        "first": lambda x: [lax.top_k(x, 3), lax.approx_max_k(x, 2)],
        "windows": lambda x: [
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 2), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (2, 5), (1, 1), "SAME"),
        ],
        "logsumexp": lambda x: [jax.nn.logsumexp(x, 1), jax.nn.softmax(x, 1)],
    }  # fmt: skip
    ties = np.array([[1, 3, 3, -1, -1, 0], [0, -0.0, 0, 2, 2, 2]], np.float32)
    with_nan = np.where(NORMAL > 1, np.nan, NORMAL).astype(np.float32)
    inputs = [(NORMAL,), (ties,), (with_nan,), (NORMAL[:1],)]
    check(tmp_path, functions, inputs, spec("b, 6"), 1e-5)


def test_places(tmp_path):
    functions = {
        "taken": lambda x, i: [x[:, i[0] % 6], jnp.take(x, i, axis=1), x[i], x[i, i],
                               jnp.take(x, i, axis=0, mode="clip")],
        "along": lambda x, i: [jnp.take_along_axis(x, i[:, None] % 6, 1),
                               x[jnp.arange(x.shape[0]), i % 6], jax.nn.one_hot(i, 5)],
        "windows": lambda x, i: [lax.dynamic_slice_in_dim(x, i[0], 2, 1),
                                 jax.vmap(lambda r, k: lax.dynamic_slice(r, (k,), (3,)))(x, i)],
        "written": lambda x, i: [x.at[:, 0].set(0.0), x.at[:, 1:3].add(1.0), x.at[0].multiply(2.0),
                                 x.at[i].set(7.0), x.at[:, i].add(1.0), x.at[i, i].max(0.5),
                                 lax.dynamic_update_slice(x, x[:1, :2] * 0, (i[0], i[1])),
                                 x.at[:, jnp.array([0, 2, 2])].add(1.0), x.at[i].min(0.0)],
        "segments": lambda x, i: [jax.ops.segment_sum(x, i, 4), jax.ops.segment_max(x, i, 4)],
        "searched": lambda x, i: [jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), x[0]),
                                  jnp.bincount(i, length=4)],
    }  # fmt: skip
    inputs = [(NORMAL, np.array(i, np.int32)) for i in ([0, 2, 1], [2, 2, 0], [-1, 9, 1])]
    check(tmp_path, functions, inputs, (spec("b, 6"), spec("b", "int32")))


def test_products_and_convolutions(tmp_path):
    draws = np.random.default_rng(1)
    kernel = draws.normal(size=(3, 3, 4, 6)).astype(np.float32)
    three = draws.normal(size=(3, 4, 5)).astype(np.float32)

    def conv(x, k, strides=(1, 1), padding="SAME", **options):
        return lax.conv_general_dilated(
            x, k, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    functions = {
        "conv": lambda x: [
            conv(x, kernel, (2, 2)),
            conv(x, kernel, padding="VALID", rhs_dilation=(2, 2)),
            conv(x, kernel[:, :, :1, :4], (2, 2), feature_group_count=4),
            conv(x, kernel[:, :, :2], (1, 2), feature_group_count=2),
            lax.conv_transpose(x, kernel, (2, 2), "SAME"),
        ],
        "rows": lambda x: lax.conv_general_dilated(
            x[:, 0], three, (2,), [(4, 0)], rhs_dilation=(2,),
            dimension_numbers=("NHC", "HIO", "NHC")),
        "channels_first": lambda x: lax.conv_general_dilated(
            x, np.ones((2, 8, 3, 3), np.float32), (1, 1), "SAME"),
        "products": lambda x: [
            x @ three[0], jnp.einsum("bhwc,bhvc->bhwv", x, x), jnp.einsum("bhwc,bhwc->b", x, x),
            jnp.tensordot(x, x, ((1, 2, 3), (1, 2, 3))), jnp.einsum("bhwc,hd->bdwc", x, x[0, :, 0]),
        ],
        "whole": lambda x: lax.dot_general(
            jnp.sign(x).astype(jnp.int8), jnp.ones((4, 2), jnp.int8), (((3,), (0,)), ((), ())),
            preferred_element_type=jnp.int32),
        "halves": lambda x: x.astype(jnp.float16) @ jnp.ones((4, 2), jnp.float16),
    }  # fmt: skip
    inputs = [(draws.normal(size=(b, 8, 8, 4)).astype(np.float32),) for b in (1, 2)]
    check(tmp_path, functions, inputs, spec("b, 8, 8, 4"), 1e-4)


def test_loops_and_branches(tmp_path):
    def summed(x):
        return lax.scan(lambda c, row: (c + row, c * row), x[0], x, reverse=True)

    functions = {
        "scan": summed,
        "nested": lambda x: lax.scan(lambda c, r: (c + summed(x)[0], (r > 0, c.sum())), x[0], x),
        "counted": lambda x: lax.fori_loop(0, x.shape[0], lambda i, y: y + x[i], x[0]),
        "while": lambda x: lax.while_loop(
            lambda s: (s[0] < 5) & (s[1].max() < 9), lambda s: (s[0] + 1, 2 * s[1]), (0, x)),
        "cond": lambda x: lax.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x - 1, x),
        "switch": lambda x: lax.switch(x.shape[0], [lambda x: x, lambda x: -x, lambda x: x * x], x),
        "mapped": lambda x: lax.map(lambda row: row.sum() * row, x),
        "associative": lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
        "gradient": jax.grad(lambda x: jnp.sum(jnp.sin(x) * jax.nn.logsumexp(x, -1)[:, None])),
    }  # fmt: skip
    check(tmp_path, functions, [(NORMAL,), (NORMAL[:1],)], spec("b, 6"), 1e-4)


def test_complex_numbers_and_fourier(tmp_path):
    functions = {
        "rfft": lambda x: [jnp.abs(jnp.fft.rfft(x)), jnp.fft.rfft(x).imag, jnp.fft.fft(x).real],
        "back": lambda x: [jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.ifft(jnp.fft.fft(x)).real],
        "planes": lambda x: jnp.fft.fft2(x.reshape(-1, 12, 13)).imag,
        "numbers": lambda x: [
            f(z)
            for z in [x[:, ::2] + 1j * x[:, 1::2]]
            for f in (
                lambda z: jnp.angle(z),
                lambda z: (z * z / (1 + z.conj())).real,
                lambda z: jnp.exp(z).imag,
                lambda z: jnp.sqrt(z).real,
                lambda z: (z @ z.T).imag,
                lambda z: z[:, 1:3].sum(1).real,
            )
        ],
    }
    x = np.random.default_rng(2).normal(size=(2, 156)).astype(np.float32)
    check(tmp_path, functions, [(x,), (x[:1],)], spec("b, 156"), 1e-4)


@pytest.mark.parametrize("way", ["multiply", "min", "max"])
def test_scattered_complex_numbers_are_more_than_their_parts(way, tmp_path):
    def apply(_, x):
        z = lax.complex(x, 2 * x)
        return getattr(z.at[jnp.array([0, 2])], way)(z[1:3]).real

    with pytest.raises(UnsupportedOperationError, match="scatter.*complex numbers"):
        to_tflite(({}, apply), tmp_path / "m.tflite", spec("5"), validate=False)


def test_random_numbers_are_those_of_jax(tmp_path):
    functions = {
        "normal": lambda k: jax.random.normal(k, (5,)),
        "split": lambda k: [jax.random.uniform(each, (2, 2)) for each in jax.random.split(k)],
        "folded": lambda k: jax.random.bits(jax.random.fold_in(k, 3), (4,)),
        "new": lambda k: jax.random.bernoulli(jax.random.wrap_key_data(k), 0.3, (6,)),
    }
    keys = [(np.array(key, np.uint32),) for key in ([0, 7], [2**32 - 1, 5])]
    check(tmp_path, functions, keys, spec("2", "uint32"), 1e-4)


def test_decompositions(tmp_path):
    def positive(x):
        return x @ x.swapaxes(-1, -2) + jnp.eye(4)

    functions = {
        "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
        "solved": lambda x: [jnp.linalg.solve(x, x[:, :, :1]), jnp.linalg.inv(positive(x)),
                             jnp.linalg.det(x), jnp.linalg.slogdet(x)[1]],
        "triangular": lambda x: jax.scipy.linalg.solve_triangular(jnp.tril(x) + jnp.eye(4), x,
                                                                  lower=True, trans=1),
        "qr": lambda x: jnp.linalg.qr(x),
        "values": lambda x: [jnp.linalg.eigvalsh(positive(x)),
                             jnp.linalg.svd(x[:, :, :3], compute_uv=False)],
    }  # fmt: skip
    x = np.random.default_rng(3).normal(size=(3, 4, 4)).astype(np.float32)
    check(tmp_path, functions, [(x,), (x[:1],)], spec("b, 4, 4"), 2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "bool", "int32"])
def test_inputs_and_outputs_of_each_dtype(tmp_path, dtype):
    x = np.asarray(jnp.asarray(INTEGERS % 3, dtype))
    functions = {"same": lambda x: x, "again": lambda x: jnp.concatenate([x, x], 1)}
    check(tmp_path, functions, [(x,)], spec("b, 6", dtype))
