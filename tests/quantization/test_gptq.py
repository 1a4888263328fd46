"""rounding="gptq": integers that make up for each other's errors."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.nets import Decoder, DecoderConfig
from pax_export.quantization import quantize
from tests.closeness import assert_close

RANDOM = np.random.default_rng(0)
#: Inputs that are correlated, as those of trained nets are.
X = (RANDOM.normal(size=(256, 16)) @ RANDOM.normal(size=(16, 64))).astype(np.float32)


@functools.cache
def net():
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(64, 32), jax.nn.relu, pax.Linear(32, 10))


@pytest.mark.parametrize("bits", [8, 4])
def test_products_are_nearer_than_with_the_nearest_integers(bits):
    reports = {how: quantize(net(), [X], bits=bits, rounding=how)[1] for how in ("nearest", "gptq")}
    means = {how: report.difference.mean for how, report in reports.items()}
    assert means["gptq"] < 0.7 * means["nearest"]
    # The arrays are farther.
    pairs = zip(reports["gptq"].leaves, reports["nearest"].leaves)
    assert all(one.relative_error > other.relative_error for one, other in pairs)
    assert [leaf.rounding for leaf in reports["gptq"].leaves] == ["gptq", "gptq"]
    assert "gptq" in str(reports["gptq"]) and "gptq" not in str(reports["nearest"])


def test_scales_of_channels_stay():
    near, _ = quantize(net(), [X])
    far, _ = quantize(net(), [X], rounding="gptq")
    assert_close(far.modules[0].weight.scales, near.modules[0].weight.scales, rtol=0)
    assert jax.tree.structure(near) == jax.tree.structure(far)
    moved = np.asarray(far.modules[0].weight.integers) - near.modules[0].weight.integers
    assert moved.any() and np.abs(moved).mean() < 2


def test_each_layer_of_a_scan_by_its_own_inputs():
    config = DecoderConfig.llama(
        vocab_size=50, dim=32, num_layers=2, num_heads=2, hidden_dim=64, tied=True
    )
    tokens = RANDOM.integers(0, 50, (8, 16)).astype(np.int32)

    def made(rounding):
        pax.seed_rng_key(0)
        lm = Decoder(config, layers="scanned")
        return quantize(lm, [tokens], bits=4, rounding=rounding)

    (scanned, report), (nearest, other) = made("gptq"), made("nearest")
    assert report.difference.kl < other.difference.kl
    kinds = {leaf.name: leaf.rounding for leaf in report.leaves}
    assert kinds["embed.weight"] == "nearest" and kinds["layers.dense.down.weight"] == "gptq"
    assert scanned.layers.dense.down.weight.scales.shape == (
        nearest.layers.dense.down.weight.scales.shape
    )


def test_convolutions_of_one_place_alone():
    pax.seed_rng_key(0)
    layers = [pax.Conv2D(16, 16, 3), pax.Conv2D(16, 16, 3, feature_group_count=16)]
    whole = pax.Sequential(*layers, pax.Conv2D(16, 8, 1))
    images = np.repeat(RANDOM.normal(size=(4, 6, 6, 4)), 4, -1).astype(np.float32)
    small, report = quantize(whole, [images], rounding="gptq", activations="minmax")
    assert [leaf.rounding for leaf in report.leaves] == ["nearest", "nearest", "gptq"]
    assert small.modules[2].weight.inputs is not None
    assert small(images).shape == (4, 6, 6, 8)


def test_refusals():
    with pytest.raises(errors.InvalidArgumentError, match="no batches"):
        quantize(net(), rounding="gptq")
    with pytest.raises(errors.InvalidArgumentError, match="train=True"):
        quantize(net(), [X], rounding="gptq", train=True)
    with pytest.raises(errors.InvalidArgumentError, match=r"(?s)'awq'.*nearest"):
        quantize(net(), [X], rounding="awq")
