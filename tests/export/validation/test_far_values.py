"""Operations on numbers far from those that models meet: what a file makes of them, beside jax.

Each function has a row: its result, and for which numbers.  All rows are one exported program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special, stats

from pax_export.export import load, spec, to_onnx, to_tflite
from tests.closeness import assert_close

INF, NAN = np.inf, np.nan
LARGE = 3.4e38
TAIL = [
    -15, -9.5, -5.3, -4.8, -3.4, -1, -0.3, 0, 0.5, 0.999, 1, 1.7, 2, 3.4, 4.8, 8, 9, INF, -INF, NAN,
]  # fmt: skip
SIGNED = [0.0, -0.0, 1.0, -1.0, 2.0, -3.0, INF, -INF, NAN, 1e30, -1e30, 1e-30, -1e-30, LARGE]
HALVES = [0.49999997, -0.49999997, 0.5, -0.5, 1.5, 2.5, -2.5, 8388609.0, -8388607.5, INF, NAN]
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


def ends(dtype):
    info = np.iinfo(dtype)
    inside = [0, 1, 2, 5, 7, 8, 31, 32, 33, 100, *([-1, -5] if info.min else [])]
    return np.array([info.min, info.min + 1, *inside, info.max // 2, info.max - 1, info.max], dtype)


def pairs(values):
    one, other = np.meshgrid(values, values)
    return one.ravel(), other.ravel()


def floats(values):
    return np.array(values, np.float32)


def reduced_by(init, function):
    def apply(x):
        return lax.reduce_window(x, jnp.float32(init), function, (3,), (2,), "SAME")

    return apply


ROWS = {
    "erfc": (lax.erfc, [floats(TAIL)]),
    "log_ndtr": (special.log_ndtr, [floats(TAIL)]),
    "norm.sf": (stats.norm.sf, [floats(TAIL)]),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), [floats(TAIL)]),
    "atan2": (lax.atan2, pairs(floats(SIGNED))),
    "angle": (lambda y, x: jnp.angle(lax.complex(x, y)), pairs(floats(SIGNED))),
    "lgamma": (lax.lgamma, [floats([-LARGE, -1e10, -3, -0.5, 0, 1e30, LARGE, INF, -INF, NAN])]),
    "away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), [floats(HALVES)]),
    "to float16": (lambda x: lax.reduce_precision(x, 5, 10), [floats([1e-7, 7e-5, 7e4, -1e-6])]),
    "to 8 bits": (
        lambda x: x.astype(jnp.float8_e5m2).astype(x.dtype),
        [floats([1e9, 57344, -INF])],
    ),
    "begun with 2": (reduced_by(2, lax.mul), [np.arange(1, 8, dtype=np.float32)]),
    "begun with 1": (reduced_by(1, lax.add), [np.arange(1, 8, dtype=np.float32)]),
}
for _dtype in INTEGERS:
    _both = pairs(ends(_dtype))
    ROWS |= {
        f"{name} of {_dtype}": (getattr(lax, f"shift_{name}"), _both)
        for name in ("left", "right_logical", "right_arithmetic")
    }
    ROWS |= {
        f"sum of {_dtype}": (lambda x, y: jnp.stack([x, y, y, x]).sum(0, dtype=x.dtype), _both),
        f"product of {_dtype}": (lambda x, y: jnp.stack([x, y, y]).prod(0, dtype=x.dtype), _both),
    }


def same(found, expected, where):
    """Each number is near to its own, however large others are; zeros have the sign they have."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected, err_msg=where)
        return
    for one, other in zip(found.flat, expected.flat, strict=True):
        assert_close(one, other, rtol=2e-5, atol=1e-37, where=where)


def test_far_values(tmp_path):
    def apply(_, *arrays):
        left = iter(arrays)
        return {name: run(*(next(left) for _ in args)) for name, (run, args) in ROWS.items()}

    arrays = [each for _, args in ROWS.values() for each in args]
    specs = tuple(spec(each.shape, each.dtype) for each in arrays)
    to_onnx(({}, apply), tmp_path / "m", specs, validate=False, card=False, exact=True)
    found = load(tmp_path / "m")(*arrays)
    for name, (run, args) in ROWS.items():
        same(found[name], jax.jit(run)(*args), name)


def test_wide_integers_wrap(tmp_path):
    """onnxruntime adds and multiplies whole numbers of 64 bits as float64."""
    with jax.enable_x64(True):
        x = np.array([[2**62, 2**62, 1, 2**62], [2**53 + 1, 1, 0, 1], [3, 2**61 + 1, 7, 5]])

        def apply(_, x):
            both = x.astype(jnp.uint64)
            return x.sum(1), x.sum(0), x.sum(), x.prod(1), both.sum((0, 1)), both.prod(0)

        to_onnx(({}, apply), tmp_path / "m.onnx", spec("n, 4", "int64"), validate=False)
        for one, other in zip(load(tmp_path / "m.onnx")(x), apply({}, x)):
            same(one, other, "")


def test_unsigned_integers_of_64_bits_have_an_order(tmp_path):
    """They are carried as int64, where the upper half of them is negative."""

    def apply(_, x, y):
        where = x[:7].astype(jnp.int32) % 3
        return {
            "less": x < y,
            "larger": jnp.maximum(x, y),
            "quotient": lax.div(x, y),
            "rest": lax.rem(x, y),
            "sign": jnp.sign(x),
            "clamp": lax.clamp(jnp.uint64(3), x, jnp.uint64(2**63 + 1)),
            "sorted": jnp.sort(x),
            "last": jnp.argmax(x),
            "least": x.min(),
            "highest": lax.cummax(x),
            "top": lax.top_k(x, 4)[0],
            "segments": jnp.zeros(3, jnp.uint64).at[where].max(x[:7]),
            "drawn": jax.random.randint(jax.random.key(1), (5,), -7, 10**12),
        }

    with jax.enable_x64(True):
        x, y = pairs(np.array([0, 1, 3, 10, 2**62, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1], "u8"))
        specs = (spec(x.shape, "uint64"), spec(y.shape, "uint64"))
        to_onnx(({}, apply), tmp_path / "m.onnx", specs, validate=False, card=False)
        found, expected = load(tmp_path / "m.onnx")(x, y), jax.jit(apply)({}, x, y)
        for name, each in expected.items():
            same(found[name], each, name)


def test_nothing_is_computed_of_nothing(tmp_path):
    """onnxruntime fails where a window is larger than what it slides over."""

    def apply(_, x, w):
        y = lax.conv_general_dilated(x, w, (1, 1), "VALID")
        return y, y.sum(), jnp.argmax(jnp.zeros((x.shape[0], 0, 3)), axis=2)

    x, w = np.ones((2, 3, 4, 4), np.float32), np.ones((5, 3, 6, 2), np.float32)
    to_onnx(({}, apply), tmp_path / "m.onnx", (spec("n, 3, 4, 4"), spec(w.shape)), validate=False)
    found = load(tmp_path / "m.onnx")(x, w)
    assert [each.shape for each in found] == [(2, 5, 0, 3), (), (2, 0)]
    assert found[1] == 0


def test_outputs_of_8_bits_are_infinite_where_jax_has_them_so(tmp_path):
    x = np.float32([1e9, -INF, 2.0])
    apply = lambda _, x: x.astype(jnp.float8_e5m2)  # noqa: E731
    to_onnx(({}, apply), tmp_path / "m.onnx", spec("n"), validate=False, card=False)
    assert load(tmp_path / "m.onnx")(x).astype(np.float32).tolist() == [INF, -INF, 2.0]


def test_a_number_of_16_bits_has_no_axis(tmp_path):
    to_onnx(({}, lambda _, x: x + 1), tmp_path / "m.onnx", spec((), "bfloat16"), validate=False)
    assert load(tmp_path / "m.onnx")(jnp.bfloat16(2)).shape == ()


@pytest.mark.parametrize(("write", "suffix"), [(to_onnx, ".onnx"), (to_tflite, ".tflite")])
def test_platforms_are_those_of_jax_on_a_cpu(write, suffix, tmp_path):
    """What is compared with jax on a CPU computes what jax does there."""

    def apply(_, x):
        add = lambda number: lambda x: x + number  # noqa: E731
        both = lax.platform_dependent(x, cpu=add(1), default=add(2))
        return both, lax.platform_dependent(x, tpu=add(3), default=add(4))

    x = np.zeros(2, np.float32)
    write(({}, apply), tmp_path / f"m{suffix}", spec("b"), examples=[x])
    found = load(tmp_path / f"m{suffix}")(x)
    assert [each.tolist() for each in jax.tree.leaves(found)] == [[1, 1], [4, 4]]
