"""Rotary embeddings, sinusoids and slopes against the formulas of their papers."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import fields

X = np.random.RandomState(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
PLACES = np.array([0, 3, 4, 9, 17])


def turned(pairs: np.ndarray, base: float) -> np.ndarray:
    """Pairs [..., length, heads, pairs] as complex numbers, turned."""
    frequencies = base ** (-np.arange(pairs.shape[-1]) / pairs.shape[-1])
    return pairs * np.exp(1j * PLACES[:, None, None] * frequencies)


def test_both_pairings_turn_complex_numbers():
    halves = turned(X[..., :4] + 1j * X[..., 4:], 100.0)
    found = pax.Rotary(8, 100.0)(X, PLACES)
    assert_close(found, np.concatenate([halves.real, halves.imag], -1), rtol=3e-6)
    beside = turned(X[..., ::2] + 1j * X[..., 1::2], 100.0)
    found = pax.Rotary(8, 100.0, "neighbors")(X, PLACES)
    assert_close(found, np.stack([beside.real, beside.imag], -1).reshape(X.shape), rtol=3e-6)


def test_the_older_spelling_of_neighbors_goes_on():
    with pytest.warns(DeprecationWarning, match="neighbors"):
        assert pax.Rotary(8, pairing="neighbours").pairing == "neighbors"
    config = dataclasses.replace(
        pax.nets.DecoderConfig.llama(vocab_size=8, dim=8, num_layers=1, num_heads=1, hidden_dim=8),
        rotary_pairing="neighbors",
    )
    with pytest.warns(DeprecationWarning, match="neighbors"):
        assert dataclasses.replace(config, rotary_pairing="neighbours") == config


def test_channels_beyond_its_size_stay_and_halves_keep_their_dtype():
    found = pax.Rotary(4)(jnp.asarray(X, jnp.bfloat16), PLACES)
    assert found.dtype == jnp.bfloat16
    assert_close(found[..., 4:], jnp.asarray(X, jnp.bfloat16)[..., 4:], rtol=0.0)


def test_scalings_change_the_frequencies():
    plain = pax.rotary_frequencies(8, 100.0)
    linear = pax.rotary_frequencies(8, 100.0, pax.RotaryScaling("linear", 4.0))
    assert_close(linear, plain / 4)
    table = pax.RotaryScaling("table", table=(1.0, 2.0, 3.0, 4.0))
    assert_close(pax.rotary_frequencies(8, 100.0, table), plain / np.arange(1, 5))
    for kind, low, high in (("llama3", 1.0, 4.0), ("yarn", 1.0, 32.0)):
        scaling = pax.RotaryScaling(kind, 8.0, 2**20, low, high)
        base = 1e12  # some pairs turn often, some less than once
        found = pax.rotary_frequencies(16, base, scaling) / pax.rotary_frequencies(16, base)
        assert found[0] == 1.0 and found[-1] == 1 / 8 and (np.diff(found) <= 0).all()
    assert_close(pax.RotaryScaling("yarn", 8.0, 64).result_factor, 1 + 0.1 * np.log(8))
    assert pax.RotaryScaling("yarn", 8.0, 64, attention_factor=0.7).result_factor == 0.7


def test_long_contexts_of_longrope_have_a_table_of_their_own():
    tables = {"table": (1.0, 2.0), "long_table": (3.0, 4.0)}
    scaling = pax.RotaryScaling("longrope", 8.0, 64, **tables)
    assert_close(scaling.result_factor, np.sqrt(1 + np.log(8) / np.log(64)))
    for length, table in ((64, (1.0, 2.0)), (65, (3.0, 4.0))):
        found = scaling.for_length(length)
        assert found.kind == "table" and found.table == table
        assert found.result_factor == scaling.result_factor
    plain = pax.rotary_frequencies(4, 100.0)
    assert_close(pax.rotary_frequencies(4, 100.0, scaling), plain / np.arange(1, 3))
    assert pax.RotaryScaling("longrope", 0.5, 64, **tables).result_factor == 1.0
    linear = pax.RotaryScaling("linear", 4.0)
    assert linear.for_length(10**6) is linear


def test_sinusoids_and_slopes_are_those_of_the_papers():
    found = pax.sinusoidal_positions(PLACES, 6)
    angles = PLACES[:, None] / 10000 ** (np.arange(0, 6, 2) / 6)
    assert_close(found, np.concatenate([np.sin(angles), np.cos(angles)], -1), rtol=3e-6)
    assert_close(pax.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    between = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]  # of 4 heads, then of 8
    assert_close(pax.alibi_slopes(6), np.array(between))


def scaling(kind, low=1.0, high=4.0, factor=2.0, **others):
    return pax.RotaryScaling(kind, factor, 64, low, high, **others)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: pax.Rotary(7), fields(where="Rotary.size", got="7")),
        (lambda: pax.Rotary(8, pairing="pairs"), fields(where="Rotary.pairing", got="'pairs'")),
        (lambda: pax.RotaryScaling("ntk", 2.0), fields(where="RotaryScaling.kind", got="'ntk'")),
        (
            lambda: pax.RotaryScaling("dynamic", 2.0),
            fields(where="RotaryScaling.kind", got="'dynamic'"),
        ),
        (
            lambda: pax.RotaryScaling("linear", 0),
            fields(where="RotaryScaling.factor", got="0"),
        ),
        (
            lambda: pax.RotaryScaling("llama3", 2.0),
            fields(where="RotaryScaling.original_length", got="None"),
        ),
        (lambda: scaling("yarn", low=0.0), fields(where="RotaryScaling.low", got="0.0")),
        (lambda: scaling("yarn", high=float("inf")), fields(where="RotaryScaling.high", got="inf")),
        (lambda: scaling("linear", factor="8"), fields(where="RotaryScaling.factor", got="'8'")),
        (lambda: scaling("llama3", low=4.0), fields(got="low=4.0, high=4.0")),
        (
            lambda: scaling("table", table=(1.0, -2.0)),
            fields(where="RotaryScaling.table", got="-2.0"),
        ),
        (
            lambda: pax.rotary_frequencies(8, 0.0),
            fields(where="rotary_frequencies: base", got="0.0"),
        ),
        (
            lambda: pax.rotary_frequencies(8, 1.0, scaling("yarn")),
            fields(got="1.0", write="a base above 1, 10000.0 in most models"),
        ),
        (
            lambda: pax.rotary_frequencies(8, 9.0, scaling("table", table=(1.0,))),
            fields(got="1 numbers for 8 rotated channels", write="4 numbers"),
        ),
    ],
)
def test_mistakes_are_named(call, expected):
    with pytest.raises(pax.errors.InvalidArgumentError) as error:
        call()
    assert error.value == expected
