"""Each scheme, and all that a quantized net is used for."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import adapters, errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.inspection import diff, inspect
from pax_export.nets import Decoder, DecoderConfig
from pax_export.quantization import dequantize, quantize
from tests.closeness import assert_close

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 64)).astype(np.float32)
SCHEMES = {
    "int8": {},
    "groups of int8": {"group": 32},
    "int4": {"bits": 4},
    "int4 with zero points": {"bits": 4, "scheme": "asymmetric"},
    "float8": {"scheme": "float"},
}


def of_schemes(*names):
    return pytest.mark.parametrize("told", [SCHEMES[name] for name in names], ids=names)


@functools.cache
def net():
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(64, 32), jax.nn.relu, pax.Linear(32, 10))


def runs(small, told, tmp_path):
    whole = dequantize(small)
    assert_close(small(X), whole(X), rtol=1e-5)
    assert_close(jax.jit(lambda n, x: n(x))(small, X), whole(X), rtol=1e-5)
    assert_close(jax.vmap(small)(X[:, None])[:, 0], whole(X), rtol=1e-5)
    gradient = jax.grad(lambda x: small(x).sum())(X)
    assert_close(gradient, jax.grad(lambda x: whole(x).sum())(X), rtol=1e-4, atol=1e-6)


def is_stored(small, told, tmp_path):
    pax.save_weights(small, tmp_path / "w.safetensors")
    again = pax.load_weights(small.map(jnp.zeros_like), tmp_path / "w.safetensors")
    assert_close(again(X), small(X), rtol=0)
    for (name, one), (_, other) in zip(
        pax.core.named_leaves(small), pax.core.named_leaves(again), strict=True
    ):
        assert one.dtype == other.dtype and np.array_equal(one, other), name
    assert_close(pickle.loads(pickle.dumps(small))(X), small(X), rtol=0)


def is_sharded(small, told, tmp_path):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    spread = pax.sharding.shard(small, mesh, {"modules.0.weight.*": P(None, "data")})
    held = spread.modules[0].weight
    for each in (held.integers, held.scales, *(() if held.zeros is None else (held.zeros,))):
        assert each.sharding.spec == P(None, "data")
    assert_close(jax.jit(lambda n, x: n(x))(spread, X), small(X), rtol=1e-5)


def is_inspected(small, told, tmp_path):
    assert repr(small.modules[0].weight) in small.summary()
    assert "modules.0.weight.integers" in str(inspect(small, X))
    assert not len(diff(small, small))
    other = quantize(net(), bits=8 if told.get("bits") else 4)[0]
    assert "modules.0.weight.integers" in str(diff(small, other))


def is_adapted(small, told, tmp_path):
    tuned = adapters.add(small, pax.Linear, rank=4)
    assert_close(tuned(X), small(X), rtol=1e-5)
    assert all("lora" in name for name, _ in pax.core.named_leaves(tuned.parameters()))
    gradient = pax.grad(lambda n: (n(X) ** 2).sum())(tuned)
    assert float(jnp.abs(gradient.modules[0].adapters["default"].lora_b).max()) > 0
    merged = adapters.merge(tuned)
    assert merged.modules[0].weight.shape == (64, 32)
    assert_close(merged(X), small(X), rtol=1e-4)


def is_trained(small, told, tmp_path):
    training, _ = quantize(net(), train=True, **told)
    assert_close(training(X), small(X), rtol=1e-5)
    gradient = pax.grad(lambda n: n(X).sum())(training)
    plain = pax.grad(lambda n: n(X).sum())(dequantize(small))
    moved, right = (g.modules[2].weight for g in (gradient, plain))
    assert_close(moved.weight, right, rtol=1e-4, atol=1e-5)
    again, _ = quantize(training)
    assert jax.tree.structure(again) == jax.tree.structure(small)
    assert_close(again(X), small(X), rtol=0)


def is_a_tree_and_a_function(small, told, tmp_path):
    params = {f"w{i}": net().modules[i].weight for i in (0, 2)} | {"b": jnp.zeros(10)}
    function = lambda p, x: jax.nn.relu(x @ p["w0"]) @ p["w2"] + p["b"]  # noqa: E731
    (few, _), report = quantize((params, function), [X], **told)
    assert list(report.kept) == ["b"]
    assert_close(few["w0"].dequantized(), small.modules[0].weight.dequantized(), rtol=0)
    assert_close(jax.jit(function)(few, X), function(dequantize(few), X), rtol=1e-5)


USES = [runs, is_stored, is_sharded, is_inspected, is_adapted, is_trained,
        is_a_tree_and_a_function]  # fmt: skip


@of_schemes("int8", "int4 with zero points", "float8")
@pytest.mark.parametrize("use", USES, ids=[each.__name__ for each in USES])
def test_a_net(use, told, tmp_path):
    use(quantize(net(), **told)[0], told, tmp_path)


@pytest.mark.parametrize(
    ("write", "scheme"),
    [
        *[(write, scheme) for write in (to_onnx, to_tflite) for scheme in SCHEMES],
        (to_saved_model, "int8"),
        (to_saved_model, "float8"),
        (to_stablehlo, "groups of int8"),
        (to_stablehlo, "int4 with zero points"),
    ],
)
def test_a_file(write, scheme, tmp_path):
    small, stored = quantize(net(), **SCHEMES[scheme])
    exactly = {"accuracy_level": 1} if write in (to_onnx, to_tflite) else {}
    report = write(small, tmp_path / "m", spec("batch, 64"), **exactly)
    assert max(report.largest_error.values()) < 1e-5
    assert_close(load(tmp_path / "m")(X), small(X), rtol=1e-4, atol=1e-5)
    if exactly:
        found, form = report.details["quantized"], small.modules[0].weight.form
        assert (found["weights"], found["bits"]) == (2, [form.bits])
        assert found.get("schemes", ["symmetric"]) == [form.scheme]
        assert form.scheme == "symmetric" or form.scheme in str(report)
    else:
        assert report.variable_bytes == stored.after


@of_schemes("groups of int8", "int4 with zero points", "float8")
def test_a_convolution_and_a_table_in_files(told, tmp_path):
    pax.seed_rng_key(0)
    whole = pax.Sequential(
        pax.Embed(40, 32), pax.Conv1D(32, 64, 3), pax.BatchNorm1D(64), pax.Conv1D(64, 8, 1)
    )
    tokens = np.array([[3, 1, 4, 1, 5, 9]], np.int32)
    small = quantize(pax.purecall(whole, tokens)[0].eval(), **told)[0]
    for write in (to_onnx, to_tflite):
        report = write(small, tmp_path / "m", spec("1, 6", "int32"), overwrite=True)
        assert report.details["quantized"]["weights"] == 3
        got = load(tmp_path / "m")(tokens)
        assert_close(got, small(tokens), rtol=0, atol=0.03 * np.abs(got).max())


@of_schemes("int4 with zero points", "float8")
def test_a_table_that_is_the_head(told):
    pax.seed_rng_key(0)
    config = DecoderConfig.llama(
        vocab_size=40, dim=32, num_layers=1, num_heads=2, hidden_dim=64, tied=True
    )
    lm, tokens = Decoder(config), np.array([[3, 1, 4]], np.int32)
    small, report = quantize(lm, at="embed", **told)
    assert [leaf.name for leaf in report.leaves] == ["embed.weight"]
    assert report.kept["layers.dense.up.weight"] == "not chosen"
    assert_close(small(tokens), dequantize(small)(tokens), rtol=1e-4, atol=1e-6)
    of_layers, report = quantize(lm.at("layers"), **told)
    assert report.kept["embed.weight"] == "not chosen" and len(report.leaves) == 7
    assert_close(of_layers(tokens), dequantize(of_layers)(tokens), rtol=1e-4, atol=1e-6)


# --- the numbers ------------------------------------------------------------------------------


def test_zero_points_are_levels_of_the_group():
    weight = RANDOM.normal(size=(64, 16)).astype(np.float32) + 0.7
    weight[:32, 3] = 2.0  # of one number
    weight[32:, 4] = 0.0
    layer = pax.Linear(64, 16).replace(weight=weight)
    small, report = quantize(layer, bits=4, scheme="asymmetric")
    held = small.weight
    assert held.zeros.dtype == np.int8 and held.zeros.shape == held.scales.shape == (2, 16)
    assert held.zeros.min() >= -8 and held.zeros.max() <= 7
    plain, of_plain = quantize(layer, bits=4)
    assert report.leaves[0].relative_error < 0.8 * of_plain.leaves[0].relative_error
    assert_close(held.dequantized()[:32, 3], weight[:32, 3], rtol=1e-3)
    assert not held.dequantized()[32:, 4].any()
    assert "int4, zero points, groups of 32" in str(report) and plain.weight.zeros is None
    # At least as near as the range from the least to the largest, which others take.
    groups = np.minimum(weight.reshape(2, 32, 16), 1e9)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = np.where(high > low, (high - low) / 15, 1)[:, None]
    zeros = np.rint(-low[:, None] / scales)
    others = (np.clip(np.rint(groups / scales) + zeros, 0, 15) - zeros) * scales
    mine = np.asarray(held.dequantized()).reshape(groups.shape)
    assert ((mine - groups) ** 2).sum() < ((others - groups) ** 2).sum()


def test_float8_is_what_ml_dtypes_rounds():
    weight = RANDOM.normal(size=(64, 16)).astype(np.float32) * np.logspace(-4, 4, 16)
    small, report = quantize(pax.Linear(64, 16).replace(weight=weight), scheme="float")
    scales = np.abs(weight).max(0, keepdims=True) / np.float32(448)
    assert_close(small.weight.scales, scales, rtol=1e-6)
    expected = (weight / np.asarray(small.weight.scales)).astype(ml_dtypes.float8_e4m3fn)
    found = np.asarray(small.weight.integers)
    assert found.dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    assert report.leaves[0].numbers == "float8" and report.leaves[0].relative_error < 0.04


def test_gptq_and_budgets_take_zero_points():
    correlated = X[:, :8] @ RANDOM.normal(size=(8, 64)).astype(np.float32)
    told = {"bits": 4, "scheme": "asymmetric"}
    _, nearest = quantize(net(), [correlated], **told)
    small, gptq = quantize(net(), [correlated], rounding="gptq", **told)
    assert small.modules[0].weight.zeros is not None
    assert gptq.difference.mean < 0.8 * nearest.difference.mean
    _, report = quantize(net(), [X], scheme="asymmetric", budget=1.0)
    assert [leaf.numbers for leaf in report.leaves] == ["int4, zero points, groups of 32"] * 2


@pytest.mark.parametrize(
    "told",
    [
        {"scheme": "asymmetric"},
        {"scheme": "affine"},
        {"scheme": "float", "bits": 4},
        {"scheme": "float", "group": 32},
    ],
)
def test_schemes_that_there_are_not(told):
    with pytest.raises(errors.InvalidArgumentError, match=r"(?s)bits=4, scheme='asymmetric'"):
        quantize(net(), **told)


def test_int8_is_what_onnxruntime_quantizes_to():
    onnx = pytest.importorskip("onnx")
    theirs = pytest.importorskip("onnxruntime.quantization.quant_utils").quantize_data
    weight = RANDOM.normal(size=(64, 16)).astype(np.float32)
    held = quantize(pax.Linear(64, 16).replace(weight=weight))[0].weight
    for channel in range(16):
        *_, zero, scale, integers = theirs(weight[:, channel], onnx.TensorProto.INT8, True)
        assert zero == 0 and np.array_equal(integers, held.integers[:, channel])
        assert_close(scale, held.scales[0, channel], rtol=1e-6)
