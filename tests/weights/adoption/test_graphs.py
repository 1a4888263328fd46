"""Weights out of graphs, which hold more than weights, and layers that are written otherwise."""

from __future__ import annotations

import numpy as np
import pytest

import pax_export as pax
from pax_export.errors import AdoptionError
from pax_export.weights import Entry, Source
from tests.closeness import assert_close
from tests.core.models import Free
from tests.refusals import refused

onnx = pytest.importorskip("onnx")


def graph(path, arrays, nodes=()):
    """A file of ONNX with these initialisers."""
    kept = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    made = onnx.helper.make_graph(nodes, "graph", [], [], initializer=kept)
    onnx.save(onnx.helper.make_model(made), path)
    return path


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


CONSTANTS = {
    "axes": np.array([0, 2]),
    "shape": np.array([-1, 8]),
    "is_training": np.array(False),
    "exponent": np.array(2.0, np.float32),
    "one": np.ones((1, 1, 1), np.float32),
}


def test_constants_of_a_graph_are_left_out_and_reported(tmp_path):
    arrays = {"fc.weight": drawn(4, 3), "fc.bias": drawn(4), **CONSTANTS}
    net, report = pax.weights.adopt(pax.Linear(3, 4), graph(tmp_path / "net.onnx", arrays))
    assert_close(net.weight, arrays["fc.weight"].T)
    assert set(report.constants) == set(CONSTANTS) == set(report.to_dict()["constants"])
    assert "5 arrays that are no weights: axes, shape, is_training, and 2 more" in str(report)


def test_a_single_number_that_a_leaf_could_be_is_no_constant(tmp_path):
    arrays = {"fc.weight": drawn(1, 3), "fc.bias": drawn(1), **CONSTANTS}
    path = graph(tmp_path / "net.onnx", arrays)
    with refused(AdoptionError, "one[1,1,1]"):
        pax.weights.adopt(pax.Linear(3, 1), path)
    net, report = pax.weights.adopt(pax.Linear(3, 1), path, ignore="one")
    assert_close(net.bias, arrays["fc.bias"])
    assert set(report.constants) == set(CONSTANTS) - {"one"}


def test_a_constant_that_the_user_names_is_not_left_out(tmp_path):
    class Scaled(pax.ParameterModule):
        def __init__(self):
            super().__init__()
            self.fc, self.factor = pax.Linear(3, 4), np.ones(2, np.float32)

    arrays = {"fc.weight": drawn(4, 3), "fc.bias": drawn(4), "shape": np.array([5, 8])}
    path = graph(tmp_path / "net.onnx", arrays)
    with refused(AdoptionError, "int64", "float32"):
        pax.weights.adopt(Scaled(), path, rename={"shape": "factor"})


def test_larger_arrays_of_a_graph_are_never_left_out(tmp_path):
    arrays = {"fc.weight": drawn(4, 3), "fc.bias": drawn(4), "table": drawn(7)}
    with refused(AdoptionError, "table[7]"):
        pax.weights.adopt(pax.Linear(3, 4), graph(tmp_path / "net.onnx", arrays))


def test_whole_numbers_of_a_file_of_weights_alone_are_not_left_out():
    arrays = {"fc.weight": drawn(4, 3), "fc.bias": drawn(4), "steps": np.array([3, 4])}
    with refused(AdoptionError, "steps[2]"):
        pax.weights.adopt(pax.Linear(3, 4), arrays)


def test_an_array_without_numbers_is_left_out_of_any_file():
    arrays = {"fc.weight": drawn(4, 3), "fc.bias": drawn(4), "_state": np.zeros(0, np.float32)}
    _, report = pax.weights.adopt(pax.Linear(3, 4), arrays)
    assert report.constants == ("_state",)


@pytest.mark.parametrize("place", [2, 3])
def test_a_convolution_over_one_axis_that_is_stored_with_two(place):
    flat = drawn(6, 4, 5)
    arrays = {"conv.weight": np.expand_dims(flat, place), "conv.bias": drawn(6)}
    net, report = pax.weights.adopt(pax.Conv1D(4, 6, 5), arrays)
    assert_close(net.weight, flat.transpose(2, 1, 0))
    assert report.rows[0].how == "OIHW to WIO"


def test_a_convolution_of_keras_that_is_stored_with_an_axis_more():
    flat = drawn(5, 4, 6)
    arrays = {"conv/kernel:0": flat[:, None], "conv/bias:0": drawn(6)}
    net, report = pax.weights.adopt(pax.Conv1D(4, 6, 5), arrays)
    assert_close(net.weight, flat)
    assert report.rows[0].how == "HWIO to WIO"


def test_a_kernel_that_is_wider_than_one_along_its_second_axis_fits_nowhere():
    arrays = {"conv.weight": drawn(6, 4, 5, 2), "conv.bias": drawn(6)}
    with refused(AdoptionError, "conv.weight[6,4,5,2]"):
        pax.weights.adopt(pax.Conv1D(4, 6, 5), arrays)


def test_a_bias_with_an_axis_of_one_is_no_bias_of_heads():
    arrays = {"fc/kernel:0": drawn(3, 4), "fc/bias:0": drawn(1, 4)}
    _, report = pax.weights.adopt(pax.Linear(3, 4), arrays)
    assert [row.how for row in report.rows] == ["", ""]


def test_arrays_of_an_operator_for_recurrent_layers_go_by_its_inputs(tmp_path):
    arrays = {f"onnx::LSTM_{n}": drawn(1, *shape) for n, shape in
              ((7, (20, 3)), (8, (20, 5)), (9, (40,)))}  # fmt: skip
    node = onnx.helper.make_node("LSTM", ["x", *arrays], ["y"], "/rnn/LSTM", hidden_size=5)
    path = graph(tmp_path / "net.onnx", arrays, [node])
    net, report = pax.weights.adopt(pax.LSTM(3, 5), path)
    kernel, recurrent, bias = (array[0] for array in arrays.values())

    def gates(array):  # i o f c become i c f o
        i, o, f, c = np.split(array, 4)
        return np.concatenate((i, c, f, o))

    assert_close(net.fc.weight, np.concatenate((gates(kernel), gates(recurrent)), axis=1).T)
    assert_close(net.fc.bias, gates(bias[:20] + bias[20:]))
    assert report.rows[0].arrays == ("onnx::LSTM_7", "onnx::LSTM_8")


def test_what_an_optimizer_keeps_is_left_out_though_it_has_the_shapes_of_the_weights():
    notes = {"fc/kernel": "", "Adam/fc/kernel/m": "optimizer", "total": "metric"}
    arrays = {name: drawn(3, 4) + place for place, name in enumerate(notes)}
    entries = {
        name: Entry("net", "checkpoint", (3, 4), "float32", lambda a=array: a, note=notes[name])
        for name, array in arrays.items()
    }
    net, report = pax.weights.adopt(pax.Linear(3, 4, False), Source("tensorflow", "net", entries))
    assert_close(net.weight, arrays["fc/kernel"])
    assert report.constants == ("Adam/fc/kernel/m", "total")


def test_layers_of_keras_that_are_wrapped_go_by_their_numbers():
    arrays = {f"time_distributed_{i}/kernel:0": drawn(3, 4) + i for i in range(1, 12)}
    towers = Free(towers=[pax.Linear(3, 4, with_bias=False) for _ in range(11)])
    net, _ = pax.weights.adopt(towers, arrays)
    for i, tower in enumerate(net.towers, start=1):
        assert_close(tower.weight, arrays[f"time_distributed_{i}/kernel:0"])


def gru(path, h=2, inputs=3, **attributes):
    arrays = {"/W": drawn(1, 3 * h, inputs), "/R": drawn(1, 3 * h, h), "/B": drawn(1, 6 * h)}
    arrays = {f"onnx::GRU_{n}": array for n, array in enumerate(arrays.values())}
    node = onnx.helper.make_node("GRU", ["x", *arrays, "", "h"], ["y"], "g", hidden_size=h,
                                 **attributes)  # fmt: skip
    return graph(path, arrays, [node]), arrays


@pytest.mark.parametrize("after", [0, 1])
def test_a_gru_of_onnx_computes_what_onnxruntime_does(tmp_path, after):
    runtime = pytest.importorskip("onnxruntime")
    h, inputs, helper = 2, 3, onnx.helper
    _, arrays = gru(tmp_path / "weights.onnx")
    node = helper.make_node("GRU", ["x", *arrays, "", "h"], ["", "y"], "g", hidden_size=h,
                            linear_before_reset=after)  # fmt: skip
    kept = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    places = [helper.make_tensor_value_info(name, 1, shape) for name, shape in
              (("x", [1, 4, inputs]), ("h", [1, 4, h]), ("y", [1, 4, h]))]  # fmt: skip
    made = helper.make_model(
        helper.make_graph([node], "graph", places[:2], places[2:], initializer=kept),
        opset_imports=[helper.make_opsetid("", 14)], ir_version=8,
    )  # fmt: skip
    path = tmp_path / "net.onnx"
    onnx.save(made, path)
    net, report = pax.weights.adopt(pax.GRU(inputs, h, reset_after=bool(after)), path)
    x, state = drawn(4, inputs), drawn(4, h)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x[None], "h": state[None]})
    assert_close(net(pax.GRUState(state), x)[1], expected[0], 1e-5)
    assert report.rows[0].how == "gates reordered"
    if after:
        with refused(AdoptionError):
            pax.weights.adopt(pax.GRU(inputs, h), path)
        return
    changed = net.replace(xh_h_fc=net.xh_h_fc.replace(bias=net.xh_h_fc.bias + 1))
    pax.weights.save_as(changed, tmp_path / "home.npz", like=path)
    with pax.weights.open_source(tmp_path / "home.npz") as source:
        back = {name: entry.read() for name, entry in source.entries.items()}
    more = np.zeros((1, 6 * h), np.float32)
    more[0, 2 * h : 3 * h] = 1
    for (name, array), add in zip(arrays.items(), (0, 0, more)):
        assert_close(back[name], array + add, 1e-6)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"linear_before_reset": 1}, "linear_before_reset=1"),
        ({"activations": ["Sigmoid", "Relu"]}, "activations=Sigmoid, Relu"),
        ({"clip": 0.5}, "clip="),
    ],
)
def test_a_gru_of_onnx_that_is_another_function_is_refused(tmp_path, attributes, says):
    path, _ = gru(tmp_path / "net.onnx", **attributes)
    with refused(AdoptionError, says):
        pax.weights.adopt(pax.GRU(3, 2), path)


def test_a_gru_of_onnx_without_its_graph_is_ambiguous():
    arrays = {"gru.W": drawn(1, 6, 3), "gru.R": drawn(1, 6, 2), "gru.B": drawn(1, 12)}
    with pytest.raises(AdoptionError):
        pax.weights.adopt(pax.GRU(3, 2), arrays, origin="onnx")


def test_an_lstm_of_onnx_that_is_another_function_is_refused(tmp_path):
    arrays = {f"onnx::LSTM_{n}": drawn(1, *shape) for n, shape in
              ((7, (20, 3)), (8, (20, 5)), (9, (40,)))}  # fmt: skip
    node = onnx.helper.make_node("LSTM", ["x", *arrays], ["y"], "r", hidden_size=5, input_forget=1)
    path = graph(tmp_path / "net.onnx", arrays, [node])
    with refused(AdoptionError, "input_forget=1"):
        pax.weights.adopt(pax.LSTM(3, 5), path)
