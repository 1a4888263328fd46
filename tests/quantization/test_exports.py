"""Quantized nets in files: the integers, the size, and what runtimes compute with them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.formats.onnx import file as onnx_file
from pax_export.export.formats.onnx.rules import quantized
from pax_export.export.formats.tflite import export as tflite_export
from pax_export.export.formats.tflite.builder import integers as tflite_integers
from pax_export.export.validation.recheck import Rechecked
from pax_export.nets import Decoder, DecoderConfig
from pax_export.precision.quantized import unpacked
from pax_export.quantization import quantize
from tests.closeness import assert_close


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@functools.cache
def mlp():
    pax.seed_rng_key(0)
    return pax.Sequential(pax.Linear(256, 512), jax.nn.relu, pax.Linear(512, 10))


@functools.cache
def convnet():
    """Convolutions of all kinds, one with a BatchNorm behind it that has statistics."""
    pax.seed_rng_key(0)
    net = pax.Sequential(
        pax.Conv2D(3, 32, 3), pax.BatchNorm2D(32), jax.nn.relu,
        pax.Conv2D(32, 32, 3, feature_group_count=32), pax.Conv2D(32, 64, 1),
        pax.Conv2DTranspose(64, 8, 3, stride=2), lambda x: x.mean((1, 2)), pax.Linear(8, 10),
    )  # fmt: skip
    return pax.purecall(net, 2 * draw(4, 8, 8, 3) + 1)[0].eval()


NETS = {mlp: ("batch, 256", draw(3, 256)), convnet: ("batch, 8, 8, 3", draw(3, 8, 8, 3))}


@functools.cache
def language_model(layers, count=1):
    pax.seed_rng_key(0)
    config = DecoderConfig.llama(
        vocab_size=64, dim=32, num_layers=count, num_heads=2, hidden_dim=64, tied=True
    )
    return Decoder(config, layers=layers)


def operators(path):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(path)
    return [node.op_type for node in model.graph.node], {
        each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer
    }


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
def test_in_float32(write, tmp_path):
    inputs, x = NETS[convnet]
    small, found = quantize(convnet())
    report = write(small, tmp_path / "m", spec(inputs), accuracy_level=1)
    assert max(report.largest_error.values()) < 1e-5
    assert_close(load(tmp_path / "m")(x), small.eval()(x), rtol=1e-4, atol=1e-5)
    assert report.details["quantized"]["weights"] == len(found.leaves)
    assert report.details["quantized"]["accuracy_level"] == 1
    assert "kernels add" not in report.details["quantized"]
    assert "the integers of the model" in str(report)


@pytest.mark.parametrize("bits", [8, 4])
def test_onnx_has_what_onnxruntime_fuses(bits, tmp_path):
    small, _ = quantize(mlp(), bits=bits)
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 256"))
    whole = to_onnx(mlp(), tmp_path / "f.onnx", spec("batch, 256"), validate=False)
    weights = 4 * (256 * 512 + 512 * 10)
    rest = whole.graph_bytes - weights
    assert (report.graph_bytes - rest) / weights < {8: 0.26, 4: 0.145}[bits] + 0.01  # nodes
    names, stored = operators(tmp_path / "m.onnx")
    assert names.count("DequantizeLinear") == 2 and "Gemm" not in names
    name = "modules.0.weight.integers" + (":int4" if bits == 4 else "")
    held = small.modules[0].weight
    integers = held.integers if bits == 8 else unpacked(held.integers, -2)
    assert np.array_equal(stored[name].astype(np.int8), integers)
    # What is added by kernels that round activations, and that nothing else is wrong.
    added = report.details["quantized"]["kernels add"]
    assert max(report.largest_error.values()) < 1e-5 < added["largest"] < 0.05 * added["scale"]
    x = draw(3, 256)
    apart = np.abs(load(tmp_path / "m.onnx")(x) - np.asarray(small(x))).max()
    assert 1e-5 < apart < 0.05
    assert "kernels add" in str(report)


@pytest.mark.parametrize(("build", "bits"), [(mlp, 4), (convnet, 8), (mlp, 8)])
def test_tflite_multiplies_integers(build, bits, tmp_path):
    inputs, x = NETS[build]
    small, found = quantize(build(), bits=bits)
    report = to_tflite(small, tmp_path / "m.tflite", spec(inputs))
    added = report.details["quantized"]["kernels add"]
    assert max(report.largest_error.values()) < 1e-5 < added["largest"] < 0.2 * added["scale"]
    got = load(tmp_path / "m.tflite")(x)
    assert_close(got, small.eval()(x), rtol=0, atol=0.05 * np.abs(got).max())
    whole = to_tflite(build(), tmp_path / "f.tflite", spec(inputs), validate=False)
    weights, share = sum(each.before for each in found.leaves), {8: 0.26, 4: 0.145}[bits]
    if build is mlp:
        # LiteRT has 12 bytes for each channel of int8.
        assert (report.graph_bytes - whole.graph_bytes + weights) / weights < share + 0.01


@pytest.mark.parametrize(("count", "bits"), [(2, 8), (3, 4)])
def test_tflite_of_a_language_model(count, bits, tmp_path):
    """Two scanned layers are written out, three are a loop, which has the integers as they are."""
    small, _ = quantize(language_model("scanned", count), bits=bits)
    tokens = np.array([[3, 1, 4, 1]], np.int32)
    inputs = spec("1, 4", "int32")
    report = to_tflite(small, tmp_path / "m.tflite", inputs, examples=[tokens])
    assert report.details["quantized"]["weights"] == 8
    assert_close(load(tmp_path / "m.tflite")(tokens), small(tokens), rtol=0.1, atol=0.1)
    if count == 3:
        content = (tmp_path / "m.tflite").read_bytes()
        held = np.asarray(small.layers.dense.up.weight.integers)
        assert content.count(held.tobytes()) == 1
        assert held.astype(np.int32).tobytes() not in content


@pytest.mark.parametrize(
    ("write", "bits", "group"),
    [
        (to_onnx, 8, None),
        (to_onnx, 8, 32),
        (to_onnx, 4, 32),
        (to_tflite, 8, 32),
        (to_tflite, 4, 32),
    ],
)
def test_the_table_of_a_tied_head_is_in_a_file_once(write, bits, group, tmp_path):
    config = DecoderConfig.llama(
        vocab_size=4096, dim=128, num_layers=1, num_heads=2, hidden_dim=128, tied=True
    )
    small, found = quantize(Decoder(config, layers="listed"), bits=bits, group=group)
    tokens = np.array([[3, 1, 4095, 1], [9, 0, 6, 5]], np.int32)
    report = write(small, tmp_path / "m", spec("batch, 4", "int32"), examples=[tokens])
    assert max(report.largest_error.values()) < 1e-4  # in float32
    share = (1 / 32 if group else 4 / 128) / 2 + bits / 32  # scales are float16 or float32
    assert report.graph_bytes < share * found.before + 80_000
    if write is to_onnx:  # the head, too
        assert len(_groups_of_products(tmp_path / "m")) == 8


def test_onnxruntime_rounds_128_inputs_of_a_channel_together(tmp_path):
    """Its own choice is 32, which takes longer; the file has a scale for each channel."""
    small, found = quantize(pax.Sequential(pax.Linear(300, 64), pax.Linear(64, 8)))
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 300"), card=False)
    assert _groups_of_products(tmp_path / "m.onnx") == [128, 32]
    assert report.variable_bytes < found.after + 500
    assert max(report.largest_error.values()) < 1e-5


def _groups_of_products(path):
    """The group of each product that onnxruntime computes of integers in a session for a file."""
    onnx, onnxruntime = map(pytest.importorskip, ("onnx", "onnxruntime"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = f"{path}.optimized"
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    found = [node.attribute for node in nodes if node.op_type == "MatMulNBits"]
    return [each.i for attributes in found for each in attributes if each.name == "block_size"]


def test_saved_models_have_numbers_in_memory(tmp_path):
    """Loaded, saved again, and in a session, which is what servers run."""
    tf = pytest.importorskip("tensorflow")
    inputs, x = NETS[convnet]
    small, found = quantize(convnet(), bits=4)  # and 8, where 3 channels are no group
    net = small.eval()
    to_saved_model(net, tmp_path / "m", spec(inputs), trainable="*.bias")
    files = (tmp_path / "m" / "variables").iterdir()
    assert sum(file.stat().st_size for file in files) < found.after + 10_000  # names
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    function = loaded.signatures["serving_default"]
    read, stored = function.graph.variables, loaded.variables
    assert "int8" not in {each.dtype.name for each in read}
    assert "int8" in {each.dtype.name for each in stored}
    expected, (name,) = np.asarray(net(x)), function.structured_outputs
    assert_close(function(x=tf.constant(x))[name], expected, rtol=1e-4, atol=1e-5)
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = tf.reduce_sum(function(x=given)[name] ** 2)
    gradient = jax.grad(lambda x: (net(x) ** 2).sum())(x)
    assert_close(tape.gradient(loss, given), gradient, rtol=1e-3, atol=1e-4)
    tf.saved_model.save(loaded, str(tmp_path / "again"), loaded.signatures)
    again = tf.saved_model.load(str(tmp_path / "again")).signatures["serving_default"]
    assert_close(again(x=tf.constant(x))[name], expected, rtol=1e-4, atol=1e-5)
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        signature = graph.signature_def["serving_default"]
        (to,), (of,) = signature.outputs.values(), signature.inputs.values()
        assert_close(session.run(to.name, {of.name: x}), expected, rtol=1e-4, atol=1e-5)


def test_a_saved_model_with_functions_of_tensorflow(tmp_path):
    """TensorFlow writes its variables, so they are the integers alone."""
    tf = pytest.importorskip("tensorflow")
    small, found = quantize(mlp(), bits=4)
    report = to_saved_model(
        small, tmp_path / "m", spec("batch, 256"), postprocess=lambda y: {"y": tf.nn.softmax(y)}
    )
    assert report.variable_bytes == found.after
    x = draw(3, 256)
    assert_close(load(tmp_path / "m")(x)["y"], jax.nn.softmax(small(x)), rtol=1e-4, atol=1e-5)


def test_onnx_folds_scales_into_scales(tmp_path):
    to_onnx(quantize(convnet())[0], tmp_path / "m.onnx", spec("batch, 8, 8, 3"))
    names, stored = operators(tmp_path / "m.onnx")
    assert "Sub" not in names and names.count("Conv") == 3
    assert any(name.startswith("modules.0.weight.scales:folded") for name in stored)


@pytest.mark.parametrize(
    ("bits", "opset", "layers"),
    [(4, 18, "listed"), (4, 21, "scanned"), (8, 21, "listed")],
)
def test_onnx_of_a_language_model(bits, opset, layers, tmp_path):
    small, _ = quantize(language_model(layers), bits=bits)
    tokens = np.array([[3, 1, 4, 1]], np.int32)
    inputs = spec("batch, time", "int32")
    report = to_onnx(small, tmp_path / "m.onnx", inputs, opset=opset, examples=[tokens])
    assert report.details["quantized"]["weights"] == 8  # those of a loop, too
    assert report.details["quantized"]["bits"] == [bits]
    assert_close(load(tmp_path / "m.onnx")(tokens), small(tokens), rtol=0.1, atol=0.1)


def refuses_integers(write, small, path, inputs, name, dtype="float32"):
    with pytest.raises(errors.ValidationError, match=f"(?s)not contain the integers.*{name}"):
        write(small, path, spec(inputs, dtype), validate=False)
    assert not path.exists()


def test_other_integers_in_a_file_are_refused(tmp_path, monkeypatch):
    before = quantized.QuantizedWeight.stored_integers

    def wrong(self, order):
        self._integers = np.roll(self._integers, 1)
        return before(self, order)

    monkeypatch.setattr(quantized.QuantizedWeight, "stored_integers", wrong)
    small, _ = quantize(mlp(), bits=4)
    refuses_integers(to_onnx, small, tmp_path / "m.onnx", "batch, 256", r"modules\.0")


def test_other_integers_of_a_loop_in_a_tflite_file_are_refused(tmp_path, monkeypatch):
    before = tflite_export.encode

    def wrong(signatures):
        content = bytes(before(signatures))
        held = np.asarray(small.layers.dense.up.weight.integers)
        return content.replace(held.tobytes(), np.roll(held, 1).tobytes())

    monkeypatch.setattr(tflite_export, "encode", wrong)
    small, _ = quantize(language_model("scanned", 3), bits=4)
    refuses_integers(to_tflite, small, tmp_path / "m.tflite", "1, 4", r"dense\.up", "int32")


def test_other_integers_of_a_loop_are_refused(tmp_path, monkeypatch):
    before = onnx_file.write

    def wrong(onnx, model, arrays, *rest):
        name = "layers.dense.up.weight.integers"
        return before(onnx, model, {**arrays, name: np.roll(arrays[name], 1)}, *rest)

    monkeypatch.setattr(onnx_file, "write", wrong)
    small, _ = quantize(language_model("scanned"), bits=4)
    refuses_integers(to_onnx, small, tmp_path / "m.onnx", "batch, 4", r"dense\.up", "int32")


def test_other_integers_in_a_tflite_file_are_refused(tmp_path, monkeypatch):
    right = tflite_integers.StoredNumbers._whole
    monkeypatch.setattr(
        tflite_integers.StoredNumbers, "_whole", lambda self: np.roll(right(self), 1)
    )
    small, _ = quantize(mlp(), bits=4)
    refuses_integers(to_tflite, small, tmp_path / "m.tflite", "batch, 256", r"modules\.0")


@pytest.mark.parametrize("write", [to_onnx, to_tflite])
def test_functions_of_weights(write, tmp_path):
    params = {"w": jnp.asarray(draw(64, 8)), "b": jnp.zeros(8)}
    net, _ = quantize((params, lambda p, x: jnp.tanh(x @ p["w"] + p["b"] + p["w"][0])))
    write(net, tmp_path / "m", spec("batch, 64"), accuracy_level=1)
    x = draw(2, 64)
    assert_close(load(tmp_path / "m")(x), net[1](net[0], x), rtol=1e-4, atol=1e-5)


def test_a_report_has_what_weights_lost_and_what_kernels_add(tmp_path):
    x = draw(8, 256)
    small, lost = quantize(mlp(), [x], bits=4, metric=lambda net: -float(jnp.abs(net(x)).mean()))
    told = {"examples": [x], "quantization": lost}
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 256"), **told)
    found = report.details["quantized"]
    assert found["weights lose"] == lost.summary()
    assert found["weights lose"]["mean"] == lost.difference.mean
    assert found["weights lose"]["bytes"] == [lost.before, lost.after]
    assert 0 < found["kernels add"]["mean"] < found["weights lose"]["mean"]
    assert found["kernels add"]["seconds"][0] > 0
    card = (tmp_path / "m.onnx.html").read_text()
    for text in (str(report), card):
        assert "weights lose" in text and "kernels add" in text and "metric" in text
    # Files whose runtimes have no kernels for integers say what the weights lost, too.
    report = to_stablehlo(small, tmp_path / "s", spec("batch, 256"), quantization=lost)
    told = {"weights": 2, "bits": [4], "in integers": 0, "weights lose": lost.summary()}
    assert report.details["quantized"] == told
    assert "the integers of the model; products in float32" in str(report)
    with pytest.raises(errors.InvalidArgumentTypeError, match=r"report of pax\.quantize"):
        to_stablehlo(small, tmp_path / "t", spec("batch, 256"), quantization=found)


def test_an_export_is_validated_against_both_nets(tmp_path):
    small, lost = quantize(mlp(), [draw(8, 256)], bits=4)
    told = {"quantization": lost, "validate": True}
    to_onnx(small, tmp_path / "m.onnx", spec("batch, 256"), **told)
    same = Rechecked(tmp_path / "m.onnx", small).checks
    assert not [each.problem for each in same if each.problem]
    of_float = Rechecked(tmp_path / "m.onnx", mlp()).checks
    assert not [each.problem for each in of_float if each.problem]
    assert max(of_float[0].largest_error.values()) > 1e-3
    other = jax.tree.map(lambda leaf: -leaf, mlp())
    for model in (other, quantize(other, bits=4)[0]):
        checks = Rechecked(tmp_path / "m.onnx", model).checks
        assert all("than the reported quantization loss" in each.problem for each in checks)


def test_weights_of_a_loop_and_a_branch(tmp_path):
    """A recurrent net reads the weights of the graph around its loop."""
    params = {name: draw(32, 32) / 6 for name in ("recurrent", "other")}

    def function(params, x):
        def step(h, row):
            h = jnp.tanh(h @ params["recurrent"] + row)
            return h, h

        h, rows = jax.lax.scan(step, jnp.ones((x.shape[1], 32)), x)
        return jax.lax.cond(h.sum() > 1e9, jnp.negative, lambda h: h @ params["other"], h), rows

    x = draw(6, 2, 32)
    for name, told in {"8": {}, "4": {"bits": 4}}.items():
        small, _ = quantize((params, function), [x], **told)
        for write in (to_onnx, to_tflite):
            path = tmp_path / f"{name}.{write.__name__}"
            write(small, path, spec("6, batch, 32"))
            for found, expected in zip(load(path)(x), small[1](small[0], x)):
                assert_close(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("told", [{"bits": 8}, {"bits": 4}, {"bits": 4, "scheme": "asymmetric"}])
def test_rows_beyond_a_table(told, tmp_path):
    """onnxruntime's `Gather` refuses the whole call."""
    pax.seed_rng_key(0)
    small, _ = quantize(pax.Sequential(pax.Embed(37, 32), pax.Linear(32, 4)), **told)
    ids = np.array([[1, 2], [3, 99], [-1, -37], [-38, -100]], np.int32)
    for write, path in ((to_onnx, tmp_path / "m.onnx"), (to_tflite, tmp_path / "m.tflite")):
        report = write(small, path, spec("batch, 2", "int32"))
        found = report.details["quantized"]
        assert (found["weights"], found["multiplied"]) == (2, 1)  # the table is looked up
        assert_close(load(path)(ids), small(ids), rtol=0, atol=1e-3)


def test_a_report_counts_products_in_loops_as_float32(tmp_path):
    pax.seed_rng_key(0)
    small, _ = quantize(
        language_model("scanned"), [np.array([[3, 1, 4]], np.int32)], activations="static"
    )
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 3", "int32"))
    assert "8 weights in int8" in str(report)
    assert "1 of 8 multiplied in integers, the others in float32" in str(report)


def test_static_inputs_of_groups_are_rounded_by_the_kernel(tmp_path):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    small, _ = quantize(mlp(), [draw(8, 256)], bits=4, activations="static")
    report = to_onnx(small, tmp_path / "m.onnx", spec("batch, 256"))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "m.onnx", options)
    names = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert names.count("MatMulNBits") == report.details["quantized"]["in integers"] == 2


def ones(net, x):
    """A net and inputs of which onnxruntime's sums of two products overflow on x86 without VNNI."""
    weights = jax.tree.map(lambda each: jnp.ones_like(each) if each.ndim > 1 else each, net)
    return weights, np.ones(x, np.float32)


def convolutions():
    return pax.Sequential(pax.Conv2D(4, 4, 3), jax.nn.relu, pax.Conv2D(4, 4, 3))


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize(
    "build, shape, activations",
    [
        (lambda: pax.Linear(64, 4), (2, 64), "static"),
        (lambda: pax.Linear(64, 4), (2, 64), "dynamic"),
        (convolutions, (2, 8, 8, 4), "static"),
    ],
)
def test_products_of_large_integers(build, shape, activations, overflows, tmp_path):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    net, x = ones(build(), shape)
    small, *_ = quantize(net, [x], activations=activations)
    path = tmp_path / "net.onnx"
    to_onnx(small, path, spec(", ".join(map(str, shape))), validate=False)
    if overflows:  # as on a processor without VNNI
        model = onnx.load(path)
        arrays = [onnx.numpy_helper.to_array(each) for each in model.graph.initializer]
        (index,) = (at for at, each in enumerate(arrays) if each.tolist() == 2 * 255 * 127)
        sums = model.graph.initializer[index]
        sums.CopyFrom(onnx.numpy_helper.from_array(np.array(0, np.int32), sums.name))
        onnx.save(model, path)
    session = ort.InferenceSession(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    assert_close(found, small(x), rtol=0.02)
