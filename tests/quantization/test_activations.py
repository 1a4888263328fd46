"""Activations of 8 bits: their scales, their numbers in jax, and the integers of files."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.nets import Decoder, DecoderConfig
from pax_export.precision import mixed_precision
from pax_export.quantization import dequantize, quantize
from tests.closeness import assert_close
from tests.export.portable.test_passes import portable
from tests.refusals import refused

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 64)).astype(np.float32)
IMAGES = RANDOM.normal(size=(8, 8, 8, 3)).astype(np.float32)
STATIC = ["static", "minmax", "percentile", "mse"]


@functools.cache
def net():
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(64, 32), jax.nn.relu, pax.Linear(32, 10))


@functools.cache
def convnet():
    """Convolutions that are followed by a rounding and by none, one with a BatchNorm."""
    pax.seed_rng_key(0)
    made = pax.Sequential(
        pax.Conv2D(3, 32, 3), pax.BatchNorm2D(32), jax.nn.relu,
        pax.Conv2D(32, 32, 3, feature_group_count=32), jax.nn.relu6,
        pax.Conv2D(32, 16, 3, stride=2, padding=[(1, 1), (1, 1)]), pax.Conv2D(16, 16, 1),
        lambda x: x.mean((1, 2)), pax.Linear(16, 10),
    )  # fmt: skip
    return pax.purecall(made, 2 * IMAGES + 1)[0].eval()


def by_numpy(x, scale, zero):
    integers = np.clip(np.rint(x / scale) + zero, -128, 127)
    return (integers - zero) * scale


@pytest.mark.parametrize("method", STATIC)
def test_inputs_are_what_one_scale_stands_for(method):
    small, report = quantize(net(), [X], activations=method)
    held = small.modules[0].weight
    scale, zero = np.float32(held.inputs.scale), float(held.inputs.zero)
    expected = by_numpy(X, scale, zero) @ np.asarray(held.dequantized())
    assert_close(small.modules[0](X), expected + np.asarray(small.modules[0].bias), rtol=1e-5)
    if method == "minmax":
        assert_close(scale, (X.max() - X.min()) / 255, rtol=1e-6)
    assert [leaf.activations for leaf in report.leaves] == [method, method]
    assert report.difference.mean > report.weights_alone.mean > 0
    assert "alone" in str(report) and f"{method} inputs" in str(report)
    # Behind a ReLU no integer is spent on what is negative.
    assert int(small.modules[2].weight.inputs.zero) == -128


def test_a_row_has_a_scale_of_its_own():
    small, _ = quantize(net(), activations="dynamic")
    weight = np.asarray(small.modules[0].weight.dequantized())
    scales = np.abs(X).max(1, keepdims=True) / np.float32(127)
    expected = np.rint(X / scales) * scales @ weight + np.asarray(small.modules[0].bias)
    assert_close(small.modules[0](X), expected, rtol=1e-5)
    # So it does not matter what else is in a batch.
    together = np.concatenate([X, 100 * X])
    assert_close(small(together)[:16], small(X), rtol=1e-5)
    assert_close(jax.vmap(small)(X[:, None])[:, 0], small(X), rtol=1e-5)
    assert not np.isnan(small(0 * X)).any()


def test_ranges_with_outliers():
    x = RANDOM.normal(size=(4096, 64)).astype(np.float32)
    x[0, 0] = 6.0

    def error(method):
        inputs = quantize(net(), [x], activations=method)[0].modules[0].weight.inputs
        apart = by_numpy(x, np.float32(inputs.scale), float(inputs.zero)) - x
        return float((apart**2).mean()), float(inputs.scale)

    (of_all, whole), (of_best, best) = error("minmax"), error("mse")
    assert of_best < of_all and best < whole
    assert error("percentile")[1] < 0.9 * whole


def test_each_layer_of_a_scan_has_its_scale():
    pax.seed_rng_key(0)
    config = DecoderConfig.llama(
        vocab_size=50, dim=32, num_layers=2, num_heads=2, hidden_dim=64, tied=True
    )
    tokens = np.array([[3, 1, 4]], np.int32)
    small, report = quantize(Decoder(config), [tokens], activations="minmax")
    assert not report.fallbacks
    scales = small.layers.dense.down.weight.inputs.scale
    assert scales.shape == (2,) and scales[0] != scales[1]
    assert_close(small.listed()(tokens), small(tokens), rtol=1e-4)
    assert 0 < report.difference.mean < 0.1 * report.difference.scale


class Partial(pax.Module):
    """A net that calls one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.other = pax.Linear(64, 8), pax.Linear(4, 4)

    def __call__(self, x):
        return self.used(x)


def test_what_no_batch_reaches_has_float_inputs():
    small, report = quantize(Partial(), [X], activations="static")
    assert small.other.weight.inputs is None and small.used.weight.inputs is not None
    assert list(report.fallbacks) == ["other.weight"]
    assert "no batch" in report.fallbacks["other.weight"]
    assert [leaf.activations for leaf in report.leaves] == ["static", None]


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_training_passes_by_the_rounding(activations):
    training, _ = quantize(net(), [X], activations=activations, train=True)
    plain, _ = quantize(net(), [X], activations=activations)
    assert_close(training(X), plain(X), rtol=1e-5)
    gradient = pax.grad(lambda n: (n(X) ** 2).sum())(training)
    assert float(jnp.abs(gradient.modules[0].weight.weight).max()) > 0
    again, _ = quantize(training)
    assert jax.tree.structure(again) == jax.tree.structure(plain)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_inputs_of_a_trained_net_are_rounded_afterwards(activations):
    """As the error of a second training says: quantize the trained net."""
    training, _ = quantize(net(), bits=4, train=True)
    with refused(errors.QuantizationError, where="modules.0.weight") as caught:
        quantize(training, bits=4, train=True)
    assert caught.value.write.startswith("quantize(net) of the trained net")
    small, report = quantize(training, [X], activations=activations)
    plain, _ = quantize(training)
    assert [leaf.activations for leaf in report.leaves] == [activations, activations]
    for one, other in zip((small[0], small[2]), (plain[0], plain[2])):
        assert (one.weight.integers == other.weight.integers).all()
    assert report.difference.largest > 0


def test_refusals():
    with pytest.raises(errors.InvalidArgumentError, match=r"(?s)no batches.*'dynamic'"):
        quantize(net(), activations="static")
    with pytest.raises(errors.InvalidArgumentError, match=r"(?s)activations.*'int8'.*'percentile'"):
        quantize(net(), [X], activations="int8")


def operators_of_onnxruntime(path, tmp_path):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, options)
    return [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]


def test_onnx_has_convolutions_of_integers(tmp_path):
    small, _ = quantize(convnet(), [IMAGES], activations="static")
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 8, 8, 3"))
    names = operators_of_onnxruntime(tmp_path / "m.onnx", tmp_path)
    assert names.count("QLinearConv") == 4 and "MatMulInteger" in " ".join(names)
    assert "Conv" not in names  # the result of the last one is rounded by its range
    assert "Clip" not in names  # whose bounds are those of the integers
    assert report.details["quantized"]["weights"] == 5
    added = report.details["quantized"]["kernels add"]
    assert added["mean"] < 0.01 * added["scale"]
    got = load(tmp_path / "m.onnx")(IMAGES)
    assert_close(got, small(IMAGES), rtol=0, atol=0.02 * np.abs(got).max())


@pytest.mark.parametrize("build", [net, convnet])
def test_dynamic_onnx_computes_what_jax_does(build, tmp_path):
    x, inputs = (X, "batch, 64") if build is net else (IMAGES, "batch, 8, 8, 3")
    small, _ = quantize(build(), activations="dynamic")
    to_onnx(small, tmp_path / "m.onnx", spec(inputs))
    names = operators_of_onnxruntime(tmp_path / "m.onnx", tmp_path)
    assert not {"ConvInteger", "Gemm", "MatMul"} & set(names)  # one is slow, two are of floats
    assert_close(load(tmp_path / "m.onnx")(x), small(x), rtol=1e-3, atol=1e-4)


def test_rows_of_transposed_images_go_into_groups(tmp_path):
    pax.seed_rng_key(0)
    made = pax.Sequential(pax.Conv2D(3, 64, 4, stride=4), pax.Linear(64, 64))
    small, _ = quantize(made, activations="dynamic", bits=4)
    to_onnx(small, tmp_path / "m.onnx", spec("batch, 8, 8, 3"))  # in which the channels are first
    rounded = load(tmp_path / "m.onnx")(IMAGES)
    assert_close(rounded, small(IMAGES), rtol=0.05, atol=0.05)  # groups have inputs of their own


def operators_of_litert(path):
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    kind = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(str(path), experimental_op_resolver_type=kind)
    dtypes = {each["index"]: each["dtype"] for each in interpreter.get_tensor_details()}
    return [
        (each["op_name"], [dtypes[i].__name__ for i in (*each["inputs"][:3], *each["outputs"])])
        for each in interpreter._get_ops_details()
    ]


def test_tflite_has_layers_of_integers(tmp_path):
    small, _ = quantize(convnet(), [IMAGES], activations="static")
    report = to_tflite(small, tmp_path / "m.tflite", spec("batch, 8, 8, 3"))
    found = operators_of_litert(tmp_path / "m.tflite")
    integers = [name for name, dtypes in found if dtypes == ["int8", "int8", "int32", "int8"]]
    assert integers == ["CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D", "CONV_2D"]
    assert report.details["quantized"]["weights"] == 5
    got = load(tmp_path / "m.tflite")(IMAGES)
    assert_close(got, small(IMAGES), rtol=0, atol=0.03 * np.abs(got).max())


def in_half(kind):
    """A quantized net with half precision around its products, and an example."""
    policy = jmp.get_policy("p=f32,c=bf16,o=f32")
    if kind == "of flax":
        flax = pytest.importorskip("flax.nnx")
        told = {"dtype": jnp.bfloat16, "rngs": flax.Rngs(0)}
        layers = flax.Conv(3, 8, (3, 3), **told), flax.BatchNorm(8, **told), flax.relu
        made = flax.Sequential(*layers, flax.Conv(8, 8, (3, 3), **told))
        made.eval()
        return quantize(made, [IMAGES], activations="static")[0]
    if kind == "policy, then quantized":
        return quantize(mixed_precision(convnet(), policy), [IMAGES], activations="static")[0]
    if kind == "half weights":
        half = convnet().at("**").cast("bfloat16")
        return quantize(half, [IMAGES], activations="static")[0]
    if kind == "a loop":
        half = jmp.get_policy("p=f16,c=f16,o=f16")
        step = lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y.astype("float16")), x)  # noqa: E731
        net = pax.Sequential(
            pax.Conv2D(3, 8, 3), lambda x: step(x.astype("float16")),
            pax.Conv2D(8, 8, 1), lambda x: x.mean((1, 2)), pax.Linear(8, 4),
        )  # fmt: skip
        return mixed_precision(quantize(net, [IMAGES], activations="static")[0], half)
    return mixed_precision(quantize(convnet(), [IMAGES], activations="static")[0], policy)


@pytest.mark.parametrize(
    "kind",
    ["policy, then quantized", "quantized, then a policy", "half weights", "of flax", "a loop"],
)
def test_half_precision_does_not_part_integers(kind, tmp_path):
    small = in_half(kind)
    call = small[1] if isinstance(small, tuple) else None
    expected = np.asarray(call(small[0], IMAGES) if call else small.eval()(IMAGES), "float32")
    for write, path in ((to_onnx, tmp_path / "m.onnx"), (to_tflite, tmp_path / "m.tflite")):
        report = write(small, path, spec("8, 8, 8, 3"), examples=[IMAGES])
        found = report.details["quantized"]
        assert found["in integers"] == found["multiplied"] == found["weights"]
        assert "half precision" not in report.details
        got = np.asarray(load(path)(IMAGES), "float32")
        assert_close(got, expected, rtol=0, atol=0.05 * np.abs(got).max())
    names = operators_of_onnxruntime(tmp_path / "m.onnx", tmp_path)
    assert "Conv" not in names
    # In float32 products the net is rounded as it rounds itself, and the report says so.
    report = to_tflite(small, tmp_path / "1.tflite", spec("8, 8, 8, 3"), accuracy_level=1)
    if kind != "half weights":  # which are constants, rounded already
        assert report.details["half precision"]["roundings"] > 0
    assert "0 of" in str(report) or "int8" not in str(report)


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
def test_a_report_counts_roundings_to_half_precision(write, tmp_path):
    half = mixed_precision(net(), jmp.get_policy("p=f32,c=f16,o=f32"))
    report = write(half, tmp_path / "half", spec("16, 64"))
    assert report.details["half precision"]["dtypes"] == ["float16"]
    assert "remove_policies" in str(report)
    assert "half precision" not in write(net(), tmp_path / "full", spec("16, 64")).details


def padded_pool(x):
    sides = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), sides)


def test_tflite_pads_and_pools_integers(tmp_path):
    """As the first layers of a ResNet do."""
    layers = pax.Conv2D(3, 8, 3), jax.nn.relu, padded_pool, pax.Conv2D(8, 4, 3)
    small, _ = quantize(pax.Sequential(*layers), [IMAGES], activations="static")
    to_tflite(small, tmp_path / "m.tflite", spec("2, 8, 8, 3"))
    found = operators_of_litert(tmp_path / "m.tflite")
    of_integers = [name for name, dtypes in found if {dtypes[0], dtypes[-1]} == {"int8"}]
    assert of_integers == ["CONV_2D", "PAD", "MAX_POOL_2D"]
    got = load(tmp_path / "m.tflite")(IMAGES[:2])
    assert_close(got, small(IMAGES[:2]), rtol=0, atol=0.03 * np.abs(got).max())


class Residual(pax.Module):
    """A convolution, a residual block with BatchNorm, and two convolutions that are added."""

    def __init__(self, data_format):
        super().__init__()
        sizes = [(3, 8), (8, 8), (8, 8), (8, 16), (8, 16)]
        told = {"padding": "SAME", "data_format": data_format}
        self.convs = [pax.Conv2D(a, b, 3, **told) for a, b in sizes]
        self.norms = [pax.BatchNorm2D(8, data_format=data_format) for _ in range(2)]
        self.mean = (2, 3) if data_format == "NCHW" else (1, 2)

    def branch(self, x):
        first, second = self.convs[1:3]
        return self.norms[1](second(jax.nn.relu(self.norms[0](first(x)))))

    def __call__(self, x):
        x = jax.nn.relu(self.convs[0](x))
        x = jax.nn.relu(self.branch(x) + x)
        return jax.nn.relu(self.convs[3](x) + self.convs[4](x)).mean(self.mean)


def residual(data_format="NHWC", images=IMAGES):
    pax.seed_rng_key(0)
    return pax.purecall(Residual(data_format), 2 * images + 1)[0].eval()


def test_outputs_have_a_range():
    small, _ = quantize(residual(), [IMAGES[:4], IMAGES[4:]], activations="static")
    plain, x = dequantize(small), jax.nn.relu(dequantize(small).convs[0](IMAGES))
    expected = plain.convs[3](jax.nn.relu(plain.branch(x) + x))
    held = small.convs[3].weight.outputs
    assert_close(held.low, expected.min((0, 1, 2)), rtol=1e-5)
    assert_close(held.high, expected.max((0, 1, 2)), rtol=1e-5)
    # A BatchNorm moves the range, and what is shared or clipped is rounded once.
    made, *_ = portable(small, spec("batch, 8, 8, 3"), integers=True)
    rounded = [e for e in made.jaxpr.eqns if e.primitive.name == "round_inputs"]
    assert len(rounded) == 7  # the image, two ReLUs, their sum, and three convolutions
    ends = plain.branch(x).min(), plain.branch(x).max()
    scales = [float(e.invars[1].val) for e in rounded if hasattr(e.invars[1], "val")]
    assert any(abs(each - (ends[1] - ends[0]) / 255) < 1e-6 for each in scales)
    # jax computes with unrounded outputs, and so does a program with float32 kernels.
    without, *_ = portable(small, spec("batch, 8, 8, 3"))
    (exact,) = without.run(IMAGES)
    assert_close(exact, small(IMAGES), rtol=1e-4, atol=1e-5)
    (near,) = made.run(IMAGES)
    assert 0 < np.abs(near - exact).mean() < 0.02 * np.abs(exact).mean()
    assert "outputs" not in quantize(residual(), activations="dynamic")[0].summary()


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_residual_blocks_add_integers(data_format, tmp_path):
    images = IMAGES if data_format == "NHWC" else IMAGES.transpose(0, 3, 1, 2)
    small, _ = quantize(residual(data_format, images), [images], activations="static")
    inputs = spec(", ".join(map(str, images.shape)))
    for write, path in ((to_onnx, tmp_path / "m.onnx"), (to_tflite, tmp_path / "m.tflite")):
        report = write(small, path, inputs, examples=[images])
        assert max(report.largest_error.values()) < 0.02  # tested without rounded outputs
        added = report.details["quantized"]["kernels add"]
        assert added["mean"] < 0.02 * added["scale"]
        got = load(path)(images)
        assert_close(got, small(images), rtol=0, atol=0.05 * np.abs(got).max())
    names = operators_of_onnxruntime(tmp_path / "m.onnx", tmp_path)
    assert names.count("QLinearConv") == 5 and names.count("QLinearAdd") == 1
    assert names.count("Transpose") <= 3 and "Conv" not in names
    found = operators_of_litert(tmp_path / "m.tflite")
    assert ("ADD", ["int8", "int8", "int8"]) in found
    layers = [dtypes for name, dtypes in found if name == "CONV_2D"]
    assert layers == [["int8", "int8", "int32", "int8"]] * 5
    assert [name for name, _ in found].count("TRANSPOSE") == (data_format == "NCHW")


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_linear_layers_in_tflite(activations, tmp_path):
    small, _ = quantize(net(), [X], activations=activations)
    to_tflite(small, tmp_path / "m.tflite", spec("batch, 64"))
    found = operators_of_litert(tmp_path / "m.tflite")
    assert [name for name, _ in found if name in ("MUL", "ROUND", "DIV")] == []
    whole = [dtypes[:2] for name, dtypes in found if name == "FULLY_CONNECTED"]
    first = ["int8", "int8"] if activations == "static" else ["float32", "int8"]
    assert whole == [first, ["float32", "int8"]]
    got = load(tmp_path / "m.tflite")(X)
    assert_close(got, small(X), rtol=0, atol=0.03 * np.abs(got).max())


@pytest.mark.parametrize(
    ("write", "activations"), [(to_saved_model, "dynamic"), (to_stablehlo, "static")]
)
def test_other_formats_round_in_float32(write, activations, tmp_path):
    small, _ = quantize(net(), [X], activations=activations)
    write(small, tmp_path / "m", spec("batch, 64"))
    assert_close(load(tmp_path / "m")(X), small(X), rtol=1e-3, atol=1e-4)


class Shortcut(pax.Module):
    """A block whose rounded outputs lose much where inputs have heavy tails."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            pax.Conv2D(3, 8, 1), pax.Conv2D(8, 8, 3), pax.Conv2D(8, 4, 1)
        )  # fmt: skip

    def __call__(self, x):
        y = jax.nn.relu(self.first(x))
        return self.last(jax.nn.relu(y + self.second(y)))


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
def test_a_report_says_what_rounded_outputs_lose(write, tmp_path):
    pax.seed_rng_key(0)
    images = np.random.default_rng(0).standard_t(2, (16, 8, 8, 3)).astype(np.float32)
    small, lost = quantize(Shortcut(), [images], activations="percentile")
    told = {"quantization": lost, "examples": [images]}
    report = write(small, tmp_path / "m", spec("16, 8, 8, 3"), **told)
    added = report.details["quantized"]["kernels add"]
    apart = np.abs(load(tmp_path / "m")(images) - small(images)).mean()
    assert_close(added["mean"], apart, rtol=0.02)  # on the examples alone
    assert ("of the outputs; fix: accuracy_level=1" in str(report)) == (
        added["mean"] > 0.1 * added["scale"]
    )
    report = write(small, tmp_path / "random", spec("16, 8, 8, 3"))
    assert "of the outputs; fix: accuracy_level=1" in str(report)
