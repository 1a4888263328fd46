"""pax.quantize: what comes out of it, and what it refuses."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.nets import Decoder, DecoderConfig
from pax_export.quantization import QuantizedArray, dequantize, quantize
from tests.closeness import assert_close
from tests.refusals import refused

X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


@functools.cache  # which nothing changes
def net(width=32):
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(64, width), jax.nn.relu, pax.Linear(width, 10))


def test_int8_is_symmetric_for_each_channel():
    weight = np.asarray(net().modules[0].weight)
    small, _ = quantize(net())
    scales = np.abs(weight).max(0, keepdims=True) / np.float32(127)
    held = small.modules[0].weight
    assert held.integers.dtype == np.int8 and held.scales.dtype == np.float32
    assert_close(held.scales, scales)
    assert np.array_equal(held.integers, np.rint(weight / np.asarray(held.scales)))
    assert int(jnp.abs(held.integers).max()) == 127


def test_int4_has_groups_with_halves_for_scales():
    weight = np.asarray(net().modules[0].weight)
    small, report = quantize(net(), bits=4)
    held = small.modules[0].weight
    assert held.integers.shape == (32, 32) and held.scales.shape == (2, 32)
    assert held.scales.dtype == np.float16
    # Nearer than by the largest of each group, which others take.
    groups = weight.reshape(2, 32, 32)
    scales = (np.abs(groups).max(1, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    plain = np.clip(np.rint(groups / scales), -8, 7) * scales
    error = np.linalg.norm(np.asarray(held.dequantized()) - weight)
    assert error < np.linalg.norm(plain - groups)
    relative = error / np.linalg.norm(weight)
    assert_close(report.leaves[0].relative_error, relative, rtol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_the_net_that_its_numbers_make(bits):
    small, report = quantize(net(), [X], bits=bits, metric=lambda n: n(X).mean())
    whole = dequantize(small)
    assert jax.tree.structure(whole) == jax.tree.structure(net())
    assert_close(small(X), whole(X), rtol=1e-5)
    apart = np.abs(np.asarray(net()(X)) - np.asarray(small(X)))
    assert_close(report.difference.largest, apart.max(), rtol=1e-4)
    assert_close(report.difference.mean, apart.mean(), rtol=1e-4)
    assert report.difference.kl > 0
    assert_close(report.metric[1], small(X).mean())
    assert report.after / report.before < {8: 0.3, 4: 0.17}[bits]
    assert report.kept == dict.fromkeys(
        ["modules.0.bias", "modules.2.bias"], "a vector or a number"
    )
    assert "as logits" in str(report)


def test_language_models():
    config = DecoderConfig.llama(vocab_size=50, dim=32, num_layers=2, num_heads=2, hidden_dim=64)
    lm, tokens = Decoder(config), jnp.array([[3, 1, 4]])
    small, report = quantize(lm, [tokens], bits=4)
    assert {leaf.bits for leaf in report.leaves} == {4}
    logits = small(tokens)
    assert_close(logits, dequantize(small)(tokens), rtol=1e-4)
    assert_close(small.listed()(tokens), logits, rtol=1e-4)
    made = pax.generate(small, tokens, max_new_tokens=3)
    assert made.tolist() == pax.generate(dequantize(small), tokens, max_new_tokens=3).tolist()


def test_convolutions():
    pax.seed_rng_key(0)
    whole = pax.Sequential(
        pax.Conv2D(3, 32, 3), pax.Conv2D(32, 8, 1), pax.Conv2DTranspose(8, 4, 3),
        pax.Conv2D(4, 8, 3, feature_group_count=4),
    )  # fmt: skip
    small, report = quantize(whole, bits=4)
    x = np.ones((1, 8, 8, 3), np.float32)
    assert_close(small(x), dequantize(small)(x), rtol=1e-5)
    assert [leaf.bits for leaf in report.leaves] == [8, 4, 8, 8]
    assert report.fallbacks["modules.0.weight"].endswith("3 is no multiple of 32")
    shapes = [layer.weight.scales.shape for layer in small.modules]
    assert shapes == [(1, 1, 1, 32), (1, 1, 1, 8), (1, 1, 4, 1), (1, 1, 1, 8)]


def test_parts_and_functions():
    some, report = quantize(net().at("modules.0"))
    assert [leaf.name for leaf in report.leaves] == ["modules.0.weight"]
    assert report.kept["modules.2.weight"] == "not chosen"
    other, _ = quantize(net(), at="modules.0")
    assert jax.tree.structure(some) == jax.tree.structure(other)
    params = {"w": jnp.asarray(X.T), "b": jnp.zeros(8), "n": jnp.arange(3)}
    (small, function), report = quantize((params, lambda p, x: x @ p["w"] + p["b"]), [X])
    assert_close(function(small, X), X @ small["w"].dequantized(), rtol=1e-5)
    assert list(report.kept) == ["b", "n"] and report.leaves[0].name == "w"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_kept(value):
    bad = net().at("modules.0.weight").apply(lambda w: w.at[0, 0].set(value))
    _, report = quantize(bad)
    assert report.kept["modules.0.weight"] == "it has NaN or infinite elements"


def test_zeros_and_numbers_outside_of_halves():
    zeros = net().at("modules.0.weight").apply(jnp.zeros_like)
    assert not quantize(zeros, bits=4)[0].modules[0].weight.dequantized().any()
    assert not quantize(zeros)[0].modules[0].weight.dequantized().any()
    large = net().at("modules.0.weight").apply(lambda w: w * 1e8)
    small, report = quantize(large, bits=4)
    assert "outside of float16" in report.fallbacks["modules.0.weight"]
    assert small.modules[0].weight.form.bits == 8


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "an empty list"),
        ([X * 0], "nothing but zeros"),
        ([X * np.nan], "NaN or infinite elements"),
        ([X[:0]], "no elements"),
    ],
)
def test_batches_are_looked_at(batches, text):
    for each in (net(), as_params()):
        with refused(errors.InvalidArgumentError, text):
            quantize(each, batches)


@pytest.mark.parametrize(
    "options",
    [{}, {"activations": "static"}, {"rounding": "gptq"}, {"budget": 0.1}, {"train": True}],
)
def test_batches_of_another_size(options):
    for each in (net(), as_params()):
        with refused(errors.InvalidArgumentError, "shapes [8, 5]"):
            quantize(each, [X[:, :5]], **options)


def as_params():
    """As flax and equinox have a net: a tree of arrays, and a function of it."""
    whole = net()
    params = {f"w{i}": whole.modules[i].weight for i in (0, 2)}
    return params, lambda p, x: jax.nn.relu(x @ p["w0"]) @ p["w2"]


def test_mistakes_with_trees_of_arrays():
    small, _ = quantize(as_params())
    with refused(errors.QuantizationError, where="w0"):
        quantize(small)
    with refused(errors.QuantizationError, where="quantize(budget=...)"):
        quantize(as_params(), [X], budget=1e-7)
    odd = {"w": jnp.ones((33, 8))}, lambda p, x: x @ p["w"]
    _, report = quantize(odd, bits=4)
    assert report.fallbacks == {"w": "int8 for each channel: 33 is no multiple of 32"}
    with refused(errors.InvalidArgumentError, where="quantize", got="b: a vector"):
        quantize(({"b": jnp.ones(3)}, lambda p, x: x + p["b"]))


@pytest.mark.parametrize(
    "scheme", [{"bits": 4}, {"bits": 4, "scheme": "asymmetric"}, {"scheme": "float"}]
)
def test_weights_that_are_integers_on_one_side_alone(scheme, tmp_path):
    small, _ = quantize(net(), **scheme)
    pax.save_weights(small, tmp_path / "small.safetensors")
    pax.save_weights(net(), tmp_path / "whole.safetensors")
    with pytest.raises(errors.WeightsMismatchError, match=r"load_weights\(pax\.quantize\(module"):
        pax.load_weights(net(), tmp_path / "small.safetensors")
    with pytest.raises(errors.WeightsMismatchError, match=r"pax\.quantize\(load_weights\(net"):
        pax.load_weights(small, tmp_path / "whole.safetensors")
    with pytest.raises(errors.WeightsMismatchError, match="modules.0.weight"):
        pax.load_weights(quantize(net())[0], tmp_path / "small.safetensors")


def test_refusals():
    with refused(errors.QuantizationError, where="modules.0.weight"):
        quantize(quantize(net())[0])
    with refused(errors.InvalidArgumentError, "bits=5", where="quantize(bits, group, scheme)"):
        quantize(net(), bits=5)
    with refused(errors.InvalidArgumentError, "group=64", where="quantize(bits, group, scheme)"):
        quantize(net(), bits=4, group=64)
    with refused(errors.InvalidArgumentTypeError, where="quantize(batches=...)", got="ndarray"):
        quantize(net(), X)
    with refused(errors.InvalidArgumentError, where="quantize"):
        quantize(pax.Sequential(jax.nn.relu))
    with refused(errors.InvalidArgumentError, where="quantize(at=...)", got="'modules.2'"):
        quantize(net().at("modules.0"), at="modules.2")
    with refused(errors.InvalidArgumentTypeError, got="dict"):
        quantize({"w": X})
    for budget in (None, 0.1):
        for metric in (lambda n: "good", "good"):
            with pytest.raises((TypeError, ValueError), match="str"):
                quantize(net(), metric=metric, budget=budget)  # pyright: ignore
    for where, options in (
        ("quantize(budget=...)", {"budget": "0.1"}),
        ("quantize(bits, group, scheme)", {"scheme": ["float"]}),
    ):
        with refused(errors.InvalidArgumentError, where=where):
            quantize(net(), [X], **options)
    small, _ = quantize(net())
    call = lambda x: x  # noqa: E731
    with refused(errors.InvalidArgumentError, where="after"):
        pax.quantization.compare_runtime(small, call, call, [X])
    with pytest.raises(TypeError):
        pax.quantization.compare_runtime(3, call, call, [X])  # pyright: ignore


def test_a_budget_chooses_bits():
    whole = net(256)
    _, of_4 = quantize(whole, [X], bits=4)
    _, of_8 = quantize(whole, [X], bits=8)
    losses = [each.difference.mean / each.difference.scale for each in (of_8, of_4)]
    _, report = quantize(whole, [X], budget=losses[1] * 1.01)
    assert [leaf.bits for leaf in report.leaves] == [4, 4]
    _, report = quantize(whole, [X], budget=losses[0] * 1.01)
    assert [leaf.bits for leaf in report.leaves] == [8, 8]
    alone = [leaf.sensitivity for leaf in report.leaves]
    assert losses[0] < min(alone) and "in 4 bits" in str(report)
    sizes = [math.prod(leaf.shape) for leaf in report.leaves]
    first = int(np.argmin(np.divide(alone, sizes)))
    _, report = quantize(whole, [X], budget=alone[first] * 1.1)
    assert [leaf.bits for leaf in report.leaves] == ([4, 8] if first == 0 else [8, 4])
    found = report.difference
    assert found.mean / found.scale <= alone[first] * 1.1
    like_metric = lambda n: -float(jnp.abs(n(X) - whole(X)).mean())  # noqa: E731
    assert quantize(whole, metric=like_metric, budget=10.0)[1].leaves[0].bits == 4
    params = {"w": jnp.asarray(X.T)}
    (few, _), report = quantize((params, lambda p, x: x @ p["w"]), [X], budget=1.0)
    assert few["w"].form.bits == 4 and report.leaves[0].sensitivity < 1


def test_a_net_that_becomes_nan_is_not_within_a_budget():
    params = {"w": jnp.asarray(X.T)}

    def fragile(params, x):  # any rounding of the weight makes NaN of it
        return jnp.sqrt(-jnp.abs(params["w"] - X.T).max()) + x @ params["w"]

    with refused(errors.QuantizationError, where="quantize(budget=...)"):
        quantize((params, fragile), [X], budget=1.0)
    _, report = quantize((params, fragile), [X])
    assert report.difference.largest == np.inf


def test_a_budget_counts_a_tied_weight_at_all_its_places():
    weight = jnp.asarray(X.T @ X / 8)
    tied, untied = {"a": weight, "b": weight}, {"a": weight, "b": weight + 0}
    function = lambda params, x: (x @ params["a"]) @ params["b"]  # noqa: E731
    _, apart = quantize((untied, function), [X], bits=4)
    _, same = quantize((tied, function), [X], budget=10.0)
    lost = apart.difference.mean / apart.difference.scale
    assert len(same.leaves) == 1
    assert_close(same.leaves[0].sensitivity, lost, rtol=0.05)


def test_a_budget_that_cannot_be_met():
    with refused(errors.QuantizationError, where="quantize(budget=...)"):
        quantize(net(), [X], budget=1e-7)
    with refused(errors.InvalidArgumentError, where="quantize(budget=...)"):
        quantize(net(), budget=0.1)


def test_training_through_rounding():
    bits = 4
    target = jnp.tanh(X @ jax.random.normal(jax.random.key(1), (64, 10)))
    training, report = quantize(net(), [X], bits=bits, train=True)
    plain, _ = quantize(net(), bits=bits)
    assert_close(training(X), plain(X), rtol=1e-5)
    assert [leaf.bits for leaf in report.leaves] == [bits, bits]
    names = [name for name, _ in pax.core.named_leaves(training.parameters())]
    assert "modules.0.weight.weight" in names
    loss = lambda n: ((n(X) - target) ** 2).mean()  # noqa: E731
    step = jax.jit(lambda n: jax.tree.map(lambda a, g: a - 0.1 * g, n, pax.grad(loss)(n)))
    trained = training
    for _ in range(60):
        trained = step(trained)
    small, _ = quantize(trained)
    assert [small.modules[i].weight.form.bits for i in (0, 2)] == [bits, bits]
    assert_close(small(X), trained(X), rtol=1e-4, atol=1e-6)
    assert float(loss(small)) < 0.7 * float(loss(plain))
    params = {"w": jnp.asarray(X.T)}
    (tree, function), _ = quantize((params, lambda p, x: x @ p["w"]), bits=bits, train=True)
    gradient = jax.grad(lambda p: function(p, X).sum())(tree)
    assert_close(gradient["w"].weight, X.T @ np.ones((8, 8), np.float32), rtol=1e-4)


def test_a_net_in_training_is_not_quantized_otherwise():
    training, _ = quantize(net(), bits=4, train=True)
    for options in (
        {"bits": 4, "train": True}, {"rounding": "gptq"}, {"bits": 4, "scheme": "asymmetric"},
        {"scheme": "float"}, {"budget": 0.1},
    ):  # fmt: skip
        with refused(errors.QuantizationError, "RoundedArray", where="modules.0.weight"):
            quantize(training, [X], **options)
    assert {leaf.bits for leaf in quantize(training, bits=4)[1].leaves} == {4}


class Own(pax.ParameterModule):
    """A layer, and arrays of its own."""

    def __init__(self):
        super().__init__()
        self.small = [jnp.ones((2, 2)) for _ in range(5)]
        self.layer = pax.Linear(16, 512)
        self.table = jnp.ones((512, 64))

    def __call__(self, x):
        return self.layer(x) @ self.table


def test_kept_arrays_are_listed_by_size():
    _, report = quantize(Own())
    assert list(report.kept)[:2] == ["table", "layer.bias"]
    assert report.kept_bytes["table"] == 4 * 512 * 64
    text = str(report)
    assert "table 128.0 KiB, small.0 16 B, small.1 16 B and 3 more, 48 B" in text
    # What the report says to write.
    (params, _), report = quantize((Own().eval(), lambda net, x: net(x)), [jnp.ones((2, 16))])
    assert "pax.quantize((net.eval(), lambda net, x: net(x)), [x])" in text
    assert [leaf.name for leaf in report.leaves] == ["layer.weight", "table"]
    assert isinstance(params.table, QuantizedArray) and "write" not in str(report)


@pytest.mark.parametrize("batches", [None, [jnp.ones(2)]])
@pytest.mark.parametrize("function", [jnp.sin, lambda x: x, jax.jit(jnp.sin)])
def test_functions_have_no_weights(function, batches):
    with pytest.raises(errors.InvalidArgumentError, match="A function without params") as caught:
        quantize(function, batches)
    assert "object at" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, h: h @ w.T, lambda w, h: h @ w.mT, lambda w, h: w.reshape(-1),
        lambda w, h: w * 2.0 - 1, lambda w, h: 1 / (3 + abs(-w)), lambda w, h: np.float32(2) * w,
        lambda w, h: w**2 > 0.1, lambda w, h: w.transpose(1, 0).sum(0),
        lambda w, h: w.swapaxes(0, 1),
        lambda w, h: jnp.stack(list(w)), lambda w, h: len(w) * w.mean(), lambda w, h: w.dot(h.T),
    ],
)  # fmt: skip
def test_a_quantized_array_is_used_as_an_array(function):
    weight = quantize(pax.Embed(6, 32), bits=4)[0].weight
    expected = function(weight.dequantized(), X[:, :32])
    assert_close(function(weight, X[:, :32]), expected, rtol=1e-6)
    assert_close(jax.jit(function)(weight, X[:, :32]), expected, rtol=1e-5, atol=1e-6)
    assert not hasattr(weight, "aval") and not hasattr(weight, "missing")
