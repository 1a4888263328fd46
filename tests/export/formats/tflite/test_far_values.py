"""Operations far from usual numbers: a table of functions and arrays, run by LiteRT, beside jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pax_export.export import load, spec, to_tflite
from tests.closeness import assert_close

FAR = np.array(
    "0 .5 -.5 1.5 3.3 -7.9 88 -88 1e5 1e19 1e30 -1e30 1e37 3e38 inf -inf nan 1e-30".split(),
    np.float32,
)
FLOATS = {
    "cubed": lambda x: x ** jnp.float32(3.0),
    "by_power": lambda x: lax.pow(x, jnp.full_like(x, -2.0)),
    "sinc": lambda x: jnp.sinc(jnp.clip(x, -9, 9)),
    "log_gamma": lambda x: lax.lgamma(jnp.where(x > 1, x, 3.0)),
    "digamma": lambda x: lax.digamma(jnp.where(x == 0, 1.0, jnp.minimum(x, 1e38))),
    "top_k": lambda x: lax.top_k(jnp.stack([-jnp.abs(x), x], 1)[:6], 2),
    "windows": lambda x: [
        lax.reduce_window(jnp.tanh(x), start, combine, (2,), (1,), ((1, 1),))
        for start, combine in ((3.0, lax.add), (0.5, lax.mul), (0.0, lax.max))
    ],
    "rsqrt": lambda x: lax.rsqrt(jnp.minimum(x, 1e37)),
    "by_root": lambda x: [2.0 / jnp.sqrt(jnp.minimum(x, 1e37)), x / jnp.sqrt(jnp.abs(x[:1]))],
}
DTYPES = ("int8", "uint16", "int32", "uint32")
SHIFTS = (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
INTEGERS = {
    "by_a_number": lambda x, y: [[f(x, y.dtype.type(n)) for n in distances(x)] for f in SHIFTS],
    "by_numbers": lambda x, y: [f(x, y) for f in SHIFTS],
    "counted": lambda x, y: lax.population_count(x),
    "clipped": lambda x, y: jnp.take(jnp.arange(5.0), x, mode="clip"),
    "same_bits": lambda x, y: lax.bitcast_convert_type(x, f"uint{8 * x.itemsize}"),
}


def distances(x):
    return 1, 8 * x.itemsize, np.array(-1).astype(x.dtype)


def check(folder, functions, specs, *arrays):
    def apply(params, *arrays):
        return {name: f(*arrays) for name, f in functions.items()}

    to_tflite(({}, apply), folder / "model.tflite", specs, validate=False)
    found, wanted = load(folder / "model.tflite")(*arrays), jax.jit(apply)({}, *arrays)
    for name in functions:
        for got, expected in zip(*map(jax.tree.leaves, (found[name], wanted[name])), strict=True):
            # Number by number: a difference among small ones counts beside 1e38, too.
            assert np.shape(got) == expected.shape
            for one, other in zip(np.ravel(got), np.ravel(expected)):
                assert_close(one, other, rtol=2e-5, atol=1e-6, where=name)


@pytest.mark.parametrize("shape", ["n", f"{len(FAR)}"])
def test_floats(shape, tmp_path):
    check(tmp_path, FLOATS, spec(shape), FAR)


def test_bits(tmp_path):
    arrays, functions = [], {}
    for place, dtype in enumerate(DTYPES):
        limits, bits = np.iinfo(dtype), 8 * np.dtype(dtype).itemsize
        values = np.array([0, 1, 100, limits.max, limits.max - 1, limits.min, limits.min // 2])
        by = np.array([0, 1, bits - 1, bits, bits + 1, 100, -1, -bits])
        arrays += np.meshgrid(values.astype(dtype), by.astype(dtype))
        for name, f in INTEGERS.items():
            functions[f"{name}_{dtype}"] = lambda *xs, f=f, n=2 * place: f(xs[n], xs[n + 1])
    check(tmp_path, functions, tuple(spec("8, 7", x.dtype) for x in arrays), *arrays)
