"""Graphs of TFLite: what is computed at once, what becomes one operator, and what a file holds."""

import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from jax import lax

import pax_export as pax
from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, spec, to_tflite
from pax_export.export.formats.tflite.builder import moves, operators
from pax_export.export.formats.tflite.builder.encode import TfliteSignature, encode
from pax_export.export.formats.tflite.builder.graph import Graph
from pax_export.export.formats.tflite.rules.control import write_while
from tests.closeness import assert_close

WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None  # an import of it is an error
import jax, numpy as np, pax_export as pax
net = pax.nets.Transformer(4, 2, 1, 0.0).eval()
conv = pax.Sequential(pax.Conv2D(1, 4, 3), pax.BatchNorm2D(4), jax.nn.relu).eval()
folder = sys.argv[1]
pax.export.to_tflite(net, folder + "/encoder.tflite", pax.export.spec("n, 5, 4"))
pax.export.to_tflite(conv, folder + "/conv.tflite", pax.export.spec("n, 8, 8, 1"))
for kind in ("float16", "dynamic"):
    inputs = pax.export.spec("1, 8, 8, 1")
    pax.export.to_tflite(conv, folder + f"/{kind}.tflite", inputs, quantize=kind)
assert pax.export.load(folder + "/conv.tflite")(np.ones((2, 8, 8, 1), "f")).shape == (2, 8, 8, 4)
"""


def test_exports_without_tensorflow(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def names(path):
    details = Interpreter(model_path=str(path))._get_ops_details()
    return Counter(each["op_name"] for each in details if each["op_name"] != "DELEGATE")


def trained(net, *shape):
    """With statistics as after training, so that a wrong BatchNorm shows."""
    images = np.random.default_rng(3).normal(2.0, 3.0, shape).astype(np.float32)
    return pax.purecall(net, images)[0].eval()


def test_batch_norm_bias_and_relu_are_part_of_convolutions(tmp_path):
    layers = [pax.Conv2D(1, 4, 3, padding="SAME"), pax.BatchNorm2D(4), jax.nn.relu]
    layers += [pax.Conv2D(4, 6, 3, stride=2, padding="SAME"), pax.BatchNorm2D(6), jax.nn.relu6]
    layers += [lambda x: x.mean((1, 2)), pax.Linear(6, 3), jax.nn.relu]
    net = trained(pax.Sequential(*layers), 4, 8, 8, 1)
    to_tflite(net, tmp_path / "m.tflite", spec("n, 8, 8, 1"))
    assert names(tmp_path / "m.tflite") == {"CONV_2D": 2, "MEAN": 1, "FULLY_CONNECTED": 1}


def test_depthwise_convolutions_fold_too(tmp_path):
    layers = [pax.Conv2D(4, 8, 3, padding="SAME", feature_group_count=4), pax.BatchNorm2D(8)]
    net = trained(pax.Sequential(*layers, jax.nn.relu6), 4, 8, 8, 4)
    to_tflite(net, tmp_path / "m.tflite", spec("1, 8, 8, 4"))
    assert names(tmp_path / "m.tflite") == {"DEPTHWISE_CONV_2D": 1}


def test_what_is_read_twice_is_not_folded(tmp_path):
    weights = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

    def apply(params, x):
        y = x @ params
        return y, y * 2.0, jax.nn.relu(y)

    report = to_tflite((weights, apply), tmp_path / "m.tflite", spec("n, 3"))
    assert report.validated == "here"
    assert names(tmp_path / "m.tflite") == {"FULLY_CONNECTED": 1, "MUL": 1, "RELU": 1}


def test_scales_that_overflow_are_not_folded(tmp_path):
    weights = np.full((2, 2), 1e30, np.float32)
    model = (weights, lambda params, x: (x @ params) * 1e20)
    report = to_tflite(model, tmp_path / "m.tflite", spec("1, 2"), validate=False)
    assert names(tmp_path / "m.tflite") == {"FULLY_CONNECTED": 1, "MUL": 1}
    (kept,) = report.details["kept"]
    assert kept.endswith("is not folded: its numbers would not be finite")
    assert kept in str(report)
    assert load(tmp_path / "m.tflite")(np.full((1, 2), 1e-20, np.float32)).max() == np.float32(2e30)


def test_relu_keeps_nan_and_infinities(tmp_path):
    x = np.array([[np.nan, np.inf, -np.inf, -0.0, 0.0, 3e38, -1e-40, 7.0]], np.float32)
    functions = {
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "after_sum": lambda x: jax.nn.relu(x + x[:, ::-1]),
        "after_product": lambda x: jax.nn.relu6(x @ jnp.eye(8)),
    }
    model = ({}, lambda params, x: {name: f(x) for name, f in functions.items()})
    to_tflite(model, tmp_path / "m.tflite", spec("n, 8"), validate=False)
    found = load(tmp_path / "m.tflite")(x)
    for name in ("relu", "relu6", "after_sum"):
        assert_close(found[name], functions[name](x), where=name)


BINARY = (
    "add subtract multiply divide maximum minimum floormod floordiv equal less greater_equal "
    "not_equal"
).split()
UNARY = "abs sqrt exp floor ceil round tanh sigmoid relu relu6 sin cos".split()
FLOATS = np.array([1.5, -2.5, 0.5, -0.0, 7.0, 2.5], np.float32)
INTEGERS = np.array([7, -7, 3, -3, 2**30, 0], np.int32)


def computed(function, *arrays):
    """What LiteRT makes of arrays, and what is computed at once of the same as constants."""
    graph = Graph("main")
    with graph.active():
        inputs = [graph.placeholder(each.shape, each.dtype) for each in arrays]
        result = function(*inputs)
        graph.outputs = [result if result.operator else moves.identity(result)]
        known = function(*(operators.constant(each) for each in arrays)).value
    content = bytes(encode([TfliteSignature("f", graph, ["x", "y"][: len(arrays)], ["z"])]))
    run = Interpreter(model_content=content).get_signature_runner("f")
    return run(**dict(zip("xy", arrays)))["z"], known


@pytest.mark.parametrize("name", BINARY)
def test_numbers_are_computed_at_once_as_litert_does(name):
    for array in (FLOATS, INTEGERS):
        if array is INTEGERS and name in ("floormod", "floordiv", "divide"):
            other = np.array([2, 2, -2, -2, 3, 5], np.int32)
        else:
            other = array[::-1].copy() + array.dtype.type(2)
        found, known = computed(getattr(operators, name), array, other)
        assert found.dtype == known.dtype
        assert_close(found, known, rtol=1e-6)


@pytest.mark.parametrize("name", UNARY)
def test_functions_are_computed_at_once_as_litert_does(name):
    found, known = computed(getattr(operators, name), np.abs(FLOATS) if name == "sqrt" else FLOATS)
    assert_close(found, known, rtol=1e-5, atol=1e-6)


MOVED = {
    "transposed": lambda x: moves.transpose(moves.transpose(x, [1, 0, 2]), [2, 0, 1]),
    "reshaped": lambda x: moves.reshape(moves.reshape(x, [6, 4]), [-1, 8]),
    "cut": lambda x: x[1, ::2, -3:],
    "padded": lambda x: moves.pad(x, [[0, 0], [1, 0], [2, 1]], 3.0),
    "padded_twice": lambda x: moves.pad(moves.pad(x, [[1, 0]] * 3), [[0, 1]] * 3),
    "summed": lambda x: operators.reduce_sum(x, [0, -1], keepdims=True),
    "gathered": lambda x: moves.gather(x, np.array([2, 0], np.int32), 1),
    "reversed_sum": lambda x: operators.cumsum(x, 1, reverse=True),
    "joined": lambda x: moves.concat([x, x], 2),
    "turned": lambda x: moves.reverse(x, [1]),
    "spread": lambda x: moves.broadcast_to(x[:, :1], np.array([2, 5, 4], np.int32)),
    "where": lambda x: operators.where(operators.less(x, 0), x[:, :1], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_arrays_are_moved_at_once_as_litert_does(name):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    found, known = computed(MOVED[name], x)
    assert_close(found, known, rtol=1e-6)


def test_loops_may_exchange_what_they_carry():
    def function(x, y):
        return write_while(
            lambda step, one, other: operators.less(step, 3),
            lambda step, one, other: (step + 1, other, one),
            [operators.constant(0), x, y],
            [[], [2], [2]],
        )[1]

    graph = Graph("main")
    with graph.active():
        inputs = [graph.placeholder([2], "float32") for _ in range(2)]
        graph.outputs = [function(*inputs)]
    content = bytes(encode([TfliteSignature("f", graph, ["x", "y"], ["z"])]))
    run = Interpreter(model_content=content).get_signature_runner("f")
    assert run(x=np.zeros(2, "f"), y=np.ones(2, "f"))["z"].tolist() == [1.0, 1.0]


def test_a_branch_may_return_constants(tmp_path):
    """In a process, since LiteRT dies where a branch returns the memory of a constant."""
    shapes, dtypes = [(), (11,), (2, 1, 2, 1, 2, 3)], ["bool", "int32", "float32"]

    def one(x, shape, dtype):
        numbers = jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 5
        known = numbers.astype(dtype)
        return lax.cond(
            x[0] > 0, lambda: (x, known), lambda: (x + 1, (numbers + x[0]).astype(dtype))
        )

    def run(params, x):
        return [one(x, shape, dtype) for shape in shapes for dtype in dtypes]

    report = to_tflite(({}, run), tmp_path / "m.tflite", spec("3", "int32"), validate="process")
    assert report.validated == "process"


def test_equal_operators_are_one(tmp_path):
    model = ({}, lambda params, x: [lax.sin(x) + 1.0, lax.sin(x) * 2.0])
    to_tflite(model, tmp_path / "m.tflite", spec("n"), validate=False)
    assert names(tmp_path / "m.tflite")["SIN"] == 1


def test_shared_weights_are_stored_once(tmp_path):
    weights = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
    model = (weights, lambda params, x: x @ params @ params)
    report = to_tflite(model, tmp_path / "m.tflite", spec("1, 200"))
    assert report.graph_bytes < 1.1 * weights.nbytes


def test_a_file_has_no_more_than_two_gigabytes(tmp_path, monkeypatch):
    from pax_export.export.formats.tflite.builder import encode

    monkeypatch.setattr(encode, "LARGEST", 100_000)
    model = (np.ones((200, 200), np.float32), lambda params, x: x @ params)
    with pytest.raises(UnsupportedOperationError, match="2 GiB"):
        to_tflite(model, tmp_path / "m.tflite", spec("1, 200"))


def test_folded_weights_are_named_and_can_stay(tmp_path):
    layers = [pax.Conv2D(1, 4, 3), pax.BatchNorm2D(4), jax.nn.relu, pax.Conv2D(4, 4, 3)]
    net = trained(pax.Sequential(*layers), 4, 8, 8, 1)
    report = to_tflite(net, tmp_path / "m.tflite", spec("n, 8, 8, 1"))
    folded = report.details["folded"]
    assert "modules.0.weight" in folded
    assert not [name for name in folded if name.startswith("modules.3")]
    report = to_tflite(net, tmp_path / "m.tflite", spec("n, 8, 8, 1"), overwrite=True, fold=False)
    assert "folded" not in report.details
    counts = names(tmp_path / "m.tflite")
    assert (counts["CONV_2D"], counts["MUL"]) == (2, 1)


KEPT = {
    "softmax": (lambda x: jax.nn.softmax(x), ["SOFTMAX"]),
    "first": (lambda x: jax.nn.softmax(x, 0), ["TRANSPOSE", "SOFTMAX", "TRANSPOSE"]),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), ["GELU"]),
    "near_gelu": (lambda x: jax.nn.gelu(x), ["GELU"]),
    "hard_swish": (jax.nn.hard_swish, ["HARD_SWISH"]),
    "silu": (jax.nn.silu, ["LOGISTIC", "MUL"]),
    "mean": (lambda x: x.mean(-1, keepdims=True), ["MEAN"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_functions_that_tflite_has_are_one_operator(name, tmp_path):
    function, expected = KEPT[name]
    rows = np.array([[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-np.inf, 0, -0.0, 1]], np.float32)
    x = np.concatenate([np.linspace(-9, 9, 40).reshape(-1, 4).astype(np.float32), rows])
    model = ({}, lambda params, x: function(x))
    for exact in (False, True):
        to_tflite(model, tmp_path / "m.tflite", spec("13, 4"), exact=exact, overwrite=True)
        loaded = load(tmp_path / "m.tflite")
        usual = x[:10].repeat(2, 0)[:13]
        assert_close(loaded(usual), function(usual), rtol=1e-5, atol=2e-6)
        if not exact:
            found = [each["op_name"] for each in loaded.runtime._get_ops_details()]
            assert [each for each in found if each != "DELEGATE"] == expected
        if name != "first":
            assert_close(loaded(x), function(x), rtol=1e-5, atol=2e-6)


def test_signatures_share_folded_weights(tmp_path):
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(64, 512)), "scale": random.normal(size=512)}
    params = {name: each.astype(np.float32) for name, each in params.items()}

    def scaled(params, x):
        return x @ params["w"] * params["scale"]

    methods = {"serving_default": scaled, "more": lambda params, x: scaled(params, x) + 1}
    inputs = dict.fromkeys(methods, spec("n, 64"))
    path = tmp_path / "m.tflite"
    report = to_tflite((params, scaled), path, inputs, methods=methods)
    assert report.details["folded"] == ["scale", "w"]
    assert path.stat().st_size < 1.5 * params["w"].nbytes
    x = random.normal(size=(3, 64)).astype(np.float32)
    assert_close(load(path).signatures["more"](x), scaled(params, x) + 1, rtol=1e-4)
