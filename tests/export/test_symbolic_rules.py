"""Operations that jax knows for numbers only, along sizes that nobody knows yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export import _errors
from pax_export._jax import symbolic_rules
from pax_export.export import load, spec, to_saved_model, to_stablehlo
from tests.closeness import assert_close
from tests.export.models import random


def own_kernel(params, x):
    """Each example makes the kernel that it is convolved with."""
    kernels = jnp.einsum("btc,tkcd->bkcd", x[:, :4], params["make"])

    def convolve(row, kernel):
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            row[None], kernel, (1,), "SAME", dimension_numbers=numbers
        )[0]

    return jax.vmap(convolve)(x, kernels)


def spectrum(params, x):
    """A real transform, one over two axes, and back again."""
    halves = jnp.fft.rfft(x * params["scale"], axis=1)
    mixed = jnp.fft.fft2(x, axes=(1, 2)).real
    filtered = jnp.fft.irfft(halves * jnp.exp(-jnp.abs(halves)), n=x.shape[1], axis=1)
    return {"size": jnp.abs(halves), "mixed": mixed, "filtered": filtered}


def recurrence(params, x):
    """A linear recurrence, as state space models have it, forwards and backwards."""

    def combine(before, after):
        return before[0] * after[0], before[1] * after[0] + after[1]

    decay = jax.nn.sigmoid(x * params["decay"])
    there = jax.lax.associative_scan(combine, (decay, x), axis=1)[1]
    back = jax.lax.associative_scan(combine, (decay, x), axis=1, reverse=True)[1]
    return there + back * jnp.cumprod(decay, axis=1)


def noisy(params, x):
    """A key for each example."""
    keys = jax.random.split(jax.random.key(3), x.shape[0])
    rows = jax.vmap(lambda key, row: row + jax.random.normal(key, row.shape))(keys, x)
    return rows * params["scale"], jax.random.bits(jax.random.key(1), x.shape[:2])


SCALE = {"scale": np.float32(0.5)}
MODELS = {
    "own kernels": (own_kernel, {"make": random(4, 3, 2, 5)}, "batch, 6, 2"),
    "transforms": (spectrum, SCALE, "batch, length, 4"),
    "recurrence": (recurrence, {"decay": np.float32(0.7)}, "batch, length, 3"),
    "keys": (noisy, SCALE, "batch, length"),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_served_with_gradients(name, tmp_path):
    function, params, shape = MODELS[name]
    report = to_saved_model((params, function), tmp_path / "m", spec(shape), trainable=True)
    assert report.oldest_tensorflow == "2.15"
    sizes = [3 if word == "batch" else 70 if word == "length" else int(word)
             for word in shape.split(", ")]  # fmt: skip
    x = random(*sizes)
    expected, found = jax.jit(function)(params, x), load(tmp_path / "m")(x)
    jax.tree.map(lambda one, two: assert_close(one, two, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_bundles_have_them_too(name, tmp_path):
    function, params, shape = MODELS[name]
    to_stablehlo((params, function), tmp_path / "m", spec(shape), vjp_order=1, platforms=("cpu",))


@pytest.mark.parametrize("length", [1, 2, 5, 64, 65, 130])
def test_transforms_of_every_kind_are_those_of_jax(length):
    real = random(2, length, 3)
    whole = (real + 1j * real[::-1]).astype(np.complex64)

    def kinds(real, whole):
        size = real.shape[1]
        return [
            jnp.fft.fft(whole, axis=1),
            jnp.fft.ifft(whole, axis=1),
            jnp.fft.rfft(real, axis=1),
            jnp.fft.irfft(whole, axis=1, n=2 * size - 1),
            jnp.fft.irfft(whole, axis=1, n=2 * size),
            jnp.fft.rfftn(real),
            jnp.fft.irfftn(jnp.fft.rfftn(real, axes=(2, 1)), axes=(2, 1), s=(3, size)),
            jnp.fft.ifft2(whole, axes=(1, 2)),
        ]

    (n,) = jax.export.symbolic_shape("n")
    structs = [jax.ShapeDtypeStruct((2, n, 3), each.dtype) for each in (real, whole)]
    with symbolic_rules():
        exported = jax.export.export(jax.jit(kinds))(*structs)
    for found, expected in zip(exported.call(real, whole), jax.jit(kinds)(real, whole)):
        assert_close(found, expected, rtol=1e-4, atol=2e-4)


def test_rules_go_when_nobody_exports():
    (n,) = jax.export.symbolic_shape("n")
    before = jax.lax.associative_scan
    with symbolic_rules(), symbolic_rules():
        assert jax.lax.associative_scan is not before
    assert jax.lax.associative_scan is before
    with pytest.raises(NotImplementedError):
        jax.export.export(jax.jit(jnp.fft.fft))(jax.ShapeDtypeStruct((n,), np.float32))


def blended(params, x):
    return jnp.linalg.eigvalsh(x + params["shift"])


def grouped(params, x):
    weights = jnp.ones((x.shape[0], 1, 3))
    return jax.lax.conv_general_dilated(
        x[None], weights, (1,), "SAME", feature_group_count=x.shape[0]
    )[0]


def inverted(params, x):
    return jnp.linalg.inv(x) + params["shift"]


REFUSED = {
    "inverses": (inverted, "n, n", "lu"),
    "eigenvalues": (blended, "n, n", "eigh"),
    "groups": (grouped, "n, 7", "conv_general_dilated"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("export", [to_saved_model, to_stablehlo])
def test_what_no_rule_can_do_is_refused_with_operation_line_and_size(name, export, tmp_path):
    function, shape, operation = REFUSED[name]
    with pytest.raises(_errors.SymbolicDimensionError) as caught:
        export(({"shift": np.float32(1)}, function), tmp_path / "m", spec(shape))
    error = caught.value
    assert error.what.startswith(f"The operation {operation} needs sizes that are known: ")
    assert error.where.startswith("test_symbolic_rules.py:")
    assert error.got == "the symbolic dimension n"
    assert error.write.startswith("a number instead of 'n' in its spec")
    assert not list(tmp_path.iterdir())


def counted(x):
    """Functions of jax.numpy that ask for a size as a number."""
    n = x.shape[0]
    rows = x[:, None] * jnp.array([1.0, -2.0])
    return {
        "linspace": jnp.linspace(-1.0, 1.0, n),
        "open": jnp.linspace(0, 1, n, endpoint=False),
        "whole": jnp.linspace(0, 100, n, dtype=int),
        "many": jnp.linspace(x[:2], x[:2] + 3, n, axis=1),
        "log": jnp.logspace(0, 1, n),
        "arange": jnp.arange(0.0, n),
        "indices": jnp.indices((n, 2)),
        "sparse": jnp.indices((2, n), sparse=True),
        "hanning": jnp.hanning(n),
        "hamming": jnp.hamming(n),
        "blackman": jnp.blackman(n),
        "bartlett": jnp.bartlett(n),
        "kaiser": jnp.kaiser(n, 5.0),
        "left": jnp.searchsorted(jnp.sort(x), jnp.append(x, jnp.nan)),
        "right": jnp.searchsorted(jnp.sort(x), x, side="right"),
        "interp": jnp.interp(jnp.linspace(-2.0, 2.0, 7), jnp.sort(x), x),
        "reflect": jnp.pad(x, (2, 3), mode="reflect"),
        "symmetric": jnp.pad(rows, ((4, 1), (1, 1)), mode="symmetric"),
        "wrap": jnp.pad(x, 2, mode="wrap"),
        "full": jnp.convolve(x, jnp.array([1.0, 2.0, 5.0])),
        "same": jnp.convolve(x, jnp.array([1.0, 2.0]), mode="same"),
        "valid": jnp.correlate(x, jnp.array([1.0, 2.0]), mode="valid"),
        "slope": jnp.gradient(x, 0.5),
        "unrolled": jax.lax.scan(lambda c, v: (c + v, c), 0.0, x, unroll=2),
        "rest": jax.lax.scan(lambda c, v: (c + v, c), 0.0, x[2:], reverse=True),
        "map": jax.lax.map(jnp.sin, x, batch_size=2),
        "filled": jnp.fill_diagonal(x[:, None] * x, 7.0, inplace=False),
        "put": jnp.put_along_axis(
            x[:, None] * x, jnp.argmax(x)[None, None], 0.0, 0, inplace=False
        ),
        "near": jax.nn.dot_product_attention(
            *[rows.reshape(1, -1, 1, 2)] * 3, is_causal=True, local_window_size=2
        ),
    }  # fmt: skip


def test_functions_that_ask_for_a_size_give_what_jax_gives():
    (n,) = jax.export.symbolic_shape("n", constraints=("n >= 2",))
    with symbolic_rules():
        exported = jax.export.export(jax.jit(counted))(jax.ShapeDtypeStruct((n,), np.float32))
    assert "pax_export" not in jnp.linspace.__code__.co_filename
    for size in (2, 5):
        x = random(size)
        found, expected = exported.call(x), jax.jit(counted)(x)
        for name, value in expected.items():
            for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(value)):
                assert one.dtype == other.dtype, name
                assert_close(one, other, rtol=1e-5, atol=1e-5, where=name)


def test_a_size_that_is_asked_for_in_vain_is_refused_as_jax_does():
    (n,) = jax.export.symbolic_shape("n")
    struct = jax.ShapeDtypeStruct((n,), np.float32)
    with symbolic_rules(), pytest.raises(Exception, match="'n' >= '3' is inconclusive"):
        jax.export.export(jax.jit(lambda x: jnp.convolve(x, jnp.ones(3), mode="same")))(struct)
    with symbolic_rules(), pytest.raises(TypeError, match="no_such"):
        jax.export.export(jax.jit(lambda x: jnp.linspace(0, 1, x.shape[0], no_such=1)))(struct)
