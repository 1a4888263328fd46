"""Products of quantized arrays, beside those of the numbers that they stand for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export._foundations.jaxpr import jaxpr_primitives
from pax_export.export.portable.passes import flattened
from pax_export.precision.quantized import (
    Form,
    QuantizedArray,
    packed,
    times,
    times_transposed,
    unpacked,
)
from pax_export.precision.quantized._integers import product_on_gpu
from tests.closeness import assert_close

RANDOM = np.random.default_rng(0)


def made(inputs, outputs, bits, group, axis):
    """A quantized array, and the numbers that it stands for, by numpy."""
    shape = (inputs, outputs)
    integers = RANDOM.integers(-8, 8, shape).astype(np.int8)
    if group is None:
        few = (1, outputs) if axis == -2 else (inputs, 1)
        scales = RANDOM.uniform(0.5, 1, few).astype(np.float32)
        numbers = integers * scales
    else:
        few = (inputs // group, outputs) if axis == -2 else (inputs, outputs // group)
        scales = RANDOM.uniform(0.5, 1, few).astype(np.float16)
        numbers = integers * np.repeat(scales.astype(np.float32), group, axis)
    held = packed(jnp.asarray(integers), axis) if bits == 4 else integers
    return QuantizedArray(held, scales, Form(bits, group, axis, "float32")), numbers


FORMS = [(8, None), (8, 32), (4, 32)]
#: One block, several, with a rest, without; short blocks with a rest; wide, without and with one.
SIZES = [(64, 40), (1536, 24), (1600, 33), (544, 20), (224, 1300), (64, 4096), (128, 4200)]


@pytest.mark.parametrize(
    ("bits", "group", "size"),
    [
        *[(4, 32, size) for size in SIZES],
        *[(*form, SIZES[i]) for form in FORMS[:2] for i in (2, 6)],
    ],
)
def test_times(bits, group, size):
    array, numbers = made(*size, bits, group, -2)
    x = RANDOM.normal(size=(3, 2, size[0])).astype(np.float32)
    assert_close(array.dequantized(), numbers, rtol=0)
    assert_close(times(x, array), x @ numbers, rtol=1e-5)
    assert_close(jax.jit(times)(x, array), x @ numbers, rtol=1e-5)
    for few in (x[0], x[0, :1]):  # row by row
        assert_close(jax.jit(times)(few, array), few @ numbers, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize("rows", [40, 1024, 1100])
def test_times_transposed(bits, group, rows):
    array, numbers = made(rows, 64, bits, group, -1)
    x = RANDOM.normal(size=(2, 64)).astype(np.float32)
    product = jax.jit(lambda x, array: times_transposed(x, array, jnp.float32))
    assert_close(product(x, array), x @ numbers.T, rtol=1e-5)
    many = RANDOM.normal(size=(7, 64)).astype(np.float32)
    assert_close(product(many, array), many @ numbers.T, rtol=1e-5)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("count", [1, 7])
def test_zero_points(axis, count):
    array, _ = made(128, 96, 4, 32, axis)
    zeros = RANDOM.integers(-8, 8, array.scales.shape).astype(np.int8)
    integers, scales = (
        np.asarray(unpacked(array.integers, axis), np.float32),
        np.repeat(np.asarray(array.scales, np.float32), 32, axis),
    )
    numbers = (integers - np.repeat(zeros, 32, axis)) * scales
    array = QuantizedArray(array.integers, array.scales, array.form, zeros=zeros)
    assert_close(array.dequantized(), numbers, rtol=1e-6)
    x = RANDOM.normal(size=(count, numbers.shape[axis])).astype(np.float32)
    if axis == -2:
        found = jax.jit(times)(x, array)
    else:
        found = jax.jit(lambda x, array: times_transposed(x, array, jnp.float32))(x, array)
    expected = x @ (numbers if axis == -2 else numbers.T)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "group", "zeros"), [*((*form, 0) for form in FORMS), (4, 32, 1)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_what_gpus_compute(axis, bits, group, zeros):
    array, numbers = made(64, 64, bits, group, axis)
    stored = [array.integers, array.scales]
    if zeros:
        stored.append(RANDOM.integers(-8, 8, array.scales.shape).astype(np.int8))
        numbers = numbers - np.repeat(stored[2] * np.float32(array.scales), 32, axis)
    for contracted in (axis, -3 - axis):
        matrix = numbers if contracted == -2 else numbers.T
        for sizes in ((), (1, 1), (2, 3)):
            for dtype, rtol in ((jnp.float32, 1e-4), (jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)):
                told = array.form._replace(dtype=jnp.dtype(dtype).name)._asdict()
                x = jnp.asarray(RANDOM.normal(size=(*sizes, 64)), dtype)
                found = product_on_gpu(x, *stored, contracted=contracted, **told)
                assert found.dtype == dtype
                assert_close(found, np.asarray(x, np.float64) @ matrix, rtol=rtol, atol=1e-3)


@pytest.mark.parametrize(("bits", "cast"), [(8, "64x96xf32"), (4, "32x96xf32")])
def test_programs_for_gpus_multiply_integers_that_are_only_cast(bits, cast):
    array, _ = made(64, 96, bits, None if bits == 8 else 32, -2)
    array = array.replace(form=array.form._replace(dtype="bfloat16"))
    traced = jax.jit(times).trace(jnp.ones((1, 64), jnp.bfloat16), array)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "64x96xbf16" in text if bits == 8 else "dot_general" not in text
    assert cast not in text and "while" not in text


@pytest.mark.parametrize("bits", [8, 4])
def test_the_slice_of_a_scanned_layer_is_not_fused_with_its_product(bits):
    """On a CPU such a loop takes three times as long."""
    layer = pax.quantize(pax.Linear(576, 1536, with_bias=False), bits=bits)[0]
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)

    def run(layers, x):
        return jax.lax.scan(lambda total, own: (total + own(total).sum(), None), x, layers)[0]

    text = jax.jit(run).lower(layers, jnp.ones((1, 576))).compile().as_text()
    bodies = re.findall(r"^%?\S+ \([^\n]*\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    slices = [body for body in bodies if re.search(r"s8\[[^\n]* dynamic-slice\(", body)]
    assert slices
    assert not [body for body in slices if " multiply(" in body]


def test_an_odd_number_of_inputs_in_8_bits():
    array, numbers = made(1023, 5, 8, None, -2)
    x = RANDOM.normal(size=(2, 1023)).astype(np.float32)
    assert_close(jax.jit(times)(x, array), x @ numbers, rtol=1e-5)


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_transforms(bits, group):
    array, numbers = made(64, 5, bits, group, -2)
    x = RANDOM.normal(size=(3, 64)).astype(np.float32)
    gradient = jax.grad(lambda x: (times(x, array) ** 2).sum())(x)
    assert_close(gradient, 2 * (x @ numbers) @ numbers.T, rtol=1e-5)
    assert_close(jax.vmap(lambda x: times(x, array))(x), x @ numbers, rtol=1e-5)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), array)
    assert_close(jax.vmap(lambda each: times(x, each))(two)[1], x @ numbers, rtol=1e-5)
    assert_close(jax.vmap(lambda each: each.dequantized())(two)[1], numbers, rtol=0)

    def of_scales(scales):
        return times(x, array.replace(scales=scales)).sum()

    wide = array.scales.astype(np.float32)
    share = slice(None, group)  # the inputs that scale [0, 2] belongs to
    terms = x[:, share] * (numbers[share, 2] / wide[0, 2])
    slope = jax.grad(of_scales)(wide)[0, 2]
    assert_close(slope, terms.sum(), rtol=1e-5, atol=1e-5 * np.abs(terms).max())


def test_packing():
    integers = jnp.asarray(RANDOM.integers(-8, 8, (3, 64, 2)), jnp.int8)
    held = packed(integers, -2)
    assert held.shape == (3, 32, 2) and (unpacked(held, -2) == integers).all()
    # The low halves of the first 16 bytes of a group are its first 16 integers.
    assert ((held[:, :16] << 4) >> 4 == integers[:, :16]).all()
    assert (held[:, :16] >> 4 == integers[:, 16:32]).all()


def test_what_knows_nothing_of_them_is_given_numbers():
    array, numbers = made(64, 5, 4, 32, -2)
    assert array.shape == (64, 5) and array.dtype == np.float32 and array.ndim == 2
    assert_close(jnp.tanh(array), np.tanh(numbers))
    assert_close(jnp.ones((1, 64)) @ array, numbers.sum(0, keepdims=True), rtol=1e-5)
    assert_close(array[3], numbers[3], rtol=0)
    assert repr(array) == "QuantizedArray(float32[64,5], bits=4, group=32)"
    assert pax.quantization.QuantizedArray is QuantizedArray


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 2, 16, 17])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_of_bfloat16(transposed, rows, dtype):
    weight = jnp.asarray(RANDOM.normal(size=(512, 512)), jnp.bfloat16)
    x = jnp.asarray(RANDOM.normal(size=(rows, 1, 512)), dtype)
    if transposed:
        call, numbers = lambda x, w: times_transposed(x, w, jnp.float32), weight.T
        expected = jnp.float32
    else:
        call, numbers, expected = times, weight, dtype
    # Older versions of jax convert bfloat16 slowly.
    taken = jax.__version_info__ >= (0, 12) and rows <= (1 if transposed else 16)
    assert ("narrow_dot" in str(jax.make_jaxpr(call)(x, weight))) == taken
    found = jax.jit(call)(x, weight)
    right = np.asarray(x, np.float64) @ np.asarray(numbers, np.float64)
    assert found.dtype == expected
    assert_close(found, right, rtol=1e-2 if expected == jnp.bfloat16 else 1e-4, atol=1e-3)
    # A few rows are one loop for all cores, not a scan.
    assert ("while" in jax.jit(call).lower(x, weight).as_text()) == (taken and rows > 2)
    gradient = jax.grad(lambda x, w: call(x, w).astype(jnp.float32).sum(), (0, 1))(x, weight)
    of_weight = jnp.broadcast_to(x.sum((0, 1))[:, None], (512, 512))
    assert_close(gradient[0][0, 0], numbers.astype(jnp.float32).sum(1), rtol=2e-2, atol=0.2)
    found = gradient[1].T if transposed else gradient[1]
    assert_close(found, of_weight, rtol=2e-2, atol=0.2)
    mapped = jax.vmap(call, (0, None))(x, weight)
    assert_close(mapped, jax.jit(call)(x, weight), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("bits", "scheme"), [(8, "symmetric"), (4, "symmetric"), (4, "asymmetric")]
)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NWC", "NCW"])
def test_convolutions_of_1x1(layout, bits, scheme):
    layer = pax.Conv2D if len(layout) == 4 else pax.Conv1D
    net = layer(64, 24, 1, data_format=layout, b_init=jax.random.normal)
    shape = [64 if each == "C" else 3 for each in layout]
    x = RANDOM.normal(size=shape).astype(np.float32)
    small, _ = pax.quantize(net, bits=bits, scheme=scheme)
    plain = pax.quantization.dequantize(small)
    program = str(jax.make_jaxpr(lambda n, x: n(x))(small, x))
    assert "pointwise_convolution" in program and "dequantize" not in program
    lowered = jax.jit(lambda n, x: n(x)).lower(small, x).as_text()
    assert "stablehlo.convolution" not in lowered
    assert_close(small(x), plain(x), rtol=1e-5, atol=1e-5)
    assert_close(small(x[0]), plain(x[0]), rtol=1e-5, atol=1e-5)
    loss = lambda n: lambda x: (n(x) ** 2).sum()  # noqa: E731
    assert_close(jax.grad(loss(small))(x), jax.grad(loss(plain))(x), rtol=1e-4, atol=1e-4)
    assert_close(jax.vmap(small)(x[None]), plain(x)[None], rtol=1e-5, atol=1e-5)
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), small)
    assert_close(jax.vmap(lambda n: n(x))(two)[1], plain(x), rtol=1e-5, atol=1e-5)
    for told in ({"stride": 2}, {"kernel_shape": 2}, {"feature_group_count": 2}):
        told = {"kernel_shape": 1, "data_format": layout, **told}
        other = pax.quantize(layer(64, 24, **told))[0]
        assert "pointwise" not in str(jax.make_jaxpr(lambda n, x: n(x))(other, x))
        assert_close(other(x), pax.quantization.dequantize(other)(x), rtol=1e-5, atol=1e-5)
    padded = layer(64, 24, 1, data_format=layout, padding=[(1, 0)] * (len(layout) - 2))
    assert "pointwise" not in str(jax.make_jaxpr(pax.quantize(padded)[0])(x))


def test_exports_have_the_products_of_jax():
    """Passes over programs know these, and not what is faster in jax alone."""
    wide = pax.Linear(512, 512).map(lambda leaf: leaf.astype(jnp.bfloat16))
    small, _ = pax.quantize(pax.Conv1D(32, 8, 1))
    for net, x in ((wide, jnp.ones((1, 512))), (small, jnp.ones((1, 3, 32)))):
        program = flattened(jax.make_jaxpr(net)(x), (), {}).program
        assert not {"narrow_dot", "pointwise_convolution"} & jaxpr_primitives(program)
