"""The arithmetic of TFLite and ONNX files, counted in what was written, is that of the net."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec
from pax_export.inspection import _onnx_rules as onnx
from pax_export.inspection import _tflite_rules as tflite
from pax_export.inspection._artifact_work import works_of
from pax_export.inspection._file_graph import Fact, Graph, Operation, Program
from pax_export.inspection._file_work import work_of_program
from pax_export.inspection._work import total, work_of
from tests.inspection.test_artifact_work import number

WRITERS = {"onnx": pax.export.to_onnx, "tflite": pax.export.to_tflite}


class Layers(pax.Module):
    """A perceptron, wide enough that what is beside its products is little."""

    def __init__(self):
        super().__init__()
        self.first, self.last = pax.Linear(48, 256), pax.Linear(256, 64)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


class Windows(pax.Module):
    """Convolutions: with strides, one for each channel, with holes, in groups."""

    def __init__(self):
        super().__init__()
        self.layers = [
            pax.Conv2D(3, 24, 5, stride=2, padding="SAME"),
            pax.Conv2D(24, 24, 3, feature_group_count=24),
            pax.Conv2D(24, 24, 3, rate=2, padding="SAME"),
            pax.Conv2D(24, 48, 3, feature_group_count=2),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum((1, 2))


class Reads(pax.Module):
    """A cell that goes through words, and a branch at the end."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = pax.LSTM(32, 32), pax.Linear(32, 32)

    def __call__(self, words):
        def step(state, word):
            return self.cell(state, word)

        state, outs = jax.lax.scan(step, self.cell.initial_state(4), words)
        return jax.lax.cond(outs.sum() > 0, lambda: self.out(state.cell), lambda: state.hidden)


NETS = {
    "layers": (Layers, spec("batch, 48")),
    "windows": (Windows, spec("2, 17, 17, 3")),
    "reads": (Reads, spec("6, 4, 32")),
}


@pytest.mark.parametrize("target", WRITERS)
@pytest.mark.parametrize("name", NETS)
def test_a_file_does_what_the_net_does(tmp_path, name, target):
    build, inputs = NETS[name]
    net = build().eval()
    WRITERS[target](net, tmp_path / "net", inputs, validate=False, card=False)
    found, known = pax.inspect(tmp_path / "net"), pax.inspect(net, inputs)
    assert abs(number(found.flops) / number(known.flops) - 1) < 0.02
    assert found.uncounted == ()
    assert found.rows[0].computed_in == "float32"


def test_sizes_that_a_program_computes_are_formulas(tmp_path):
    def call(params, tokens):
        x = params["w"][tokens]  # [batch, length, 32]
        scores = jnp.einsum("bld,bmd->blm", x, x)
        return jnp.concatenate([jnp.matmul(scores, x), x], axis=1).reshape(-1, 32) @ params["out"]

    params = {"w": jnp.ones((50, 32)), "out": jnp.ones((32, 40))}
    inputs = spec("batch, length", "int32")
    for target, write in WRITERS.items():
        path = tmp_path / target
        write((params, call), path, inputs, validate=False, card=False)
        found = pax.inspect(path)
        assert found.uncounted == ()
        expected = 2 * 2 * 5 * 9 * 9 * 32 + 2 * (2 * 5 * 9) * 32 * 40
        assert abs(number(found.flops) / expected - 1) < 0.02


def test_loops_of_unknown_length_are_said(tmp_path):
    def call(params, x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ params["w"], x)

    model = {"w": jnp.full((16, 16), 2.0)}, call
    for target, write in WRITERS.items():
        path = tmp_path / target
        write(model, path, spec("16, 16"), validate=False, card=False)
        found = pax.inspect(path)
        (said,) = found.uncounted
        assert said.endswith("(its body counts once)")
        assert found.flops >= 2 * 16**3


@pytest.mark.parametrize("target", WRITERS)
def test_a_damaged_file_is_told(tmp_path, target):
    path = tmp_path / "net"
    model = {"w": jnp.ones((4, 4))}, lambda p, x: x @ p["w"]
    report = WRITERS[target](model, path, spec("batch, 4"), validate=False, card=False)
    content = path.read_bytes()
    inputs = {"serving_default": report.signatures["serving_default"].inputs}
    assert total(works_of(path, report, inputs)["serving_default"]) is not None
    for end in (0, 3, 40, 200):
        path.write_bytes(content[:end])
        (said,) = works_of(path, report, inputs)["serving_default"].uncounted
        assert said.startswith("all of it: ValueError: ")
    random = np.random.default_rng(0)
    for _ in range(200):  # somewhere another byte: any count, or none, and no error
        place, byte = int(random.integers(len(content) // 2)), int(random.integers(256))
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        works_of(path, report, inputs)


# --- operations that our files have seldom or never ---------------------------------------


def work(language, name, shapes, result=None, values=(), **attributes):
    """Of one operation; some of its operands are whole numbers."""
    facts = {n: Fact(tuple(shape), "float32") for n, shape in enumerate(shapes)}
    for n, value in enumerate(values, len(shapes)):
        facts[n] = Fact(np.shape(value), "int64", np.array(value, object))
    facts["out"] = Fact(result, "float32")
    operation = Operation(name, list(range(len(shapes) + len(values))), ["out"], attributes)
    program = Program(Graph([], ["out"], [operation], facts), {})
    return work_of_program(program, {}, language.LANGUAGE)


def of_jax(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return total(work_of(jax.make_jaxpr(function)(*arrays)))


def conv(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, **options)


def test_products():
    assert total(work(onnx, "Gemm", [(5, 7), (3, 7), (3,)], transB=1)) == 2 * 5 * 7 * 3 + 15
    assert total(work(onnx, "Gemm", [(7, 5), (7, 3)], transA=1, alpha=0.5)) == 2 * 105 + 15
    assert total(work(onnx, "Einsum", [(2, 5, 7), (2, 7, 3)], equation="bij,bjk->bik")) == 420
    assert total(work(onnx, "Einsum", [(5,), (7,)], equation="i,j->ij")) == 35
    assert total(work(onnx, "MatMul", [(4, 1, 5, 7), (6, 7, 3)])) == 4 * 6 * 210
    assert total(work(tflite, "FULLY_CONNECTED", [(5, 7), (3, 7), (3,)], activation=1)) == 240
    assert total(work(tflite, "BATCH_MATMUL", [(2, 7, 5), (2, 3, 7)], adj_x=1, adj_y=1)) == 420


def test_convolutions_count_where_the_kernel_meets_the_image():
    x, w = (2, 4, 9, 8), (6, 2, 3, 3)
    options = {"strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2], "group": 2}
    expected = of_jax(
        lambda x, w: conv(x, w, window_strides=(2, 1), padding=((1, 1), (0, 2)),
                          rhs_dilation=(1, 2), feature_group_count=2),
        x, w,
    )  # fmt: skip
    assert total(work(onnx, "Conv", [x, w], **options)) == expected
    same = of_jax(lambda x, w: conv(x, w, window_strides=(2, 2), padding="SAME"), (1, 2, 7, 7), w)
    found = work(onnx, "Conv", [(1, 2, 7, 7), w], strides=[2, 2], auto_pad="SAME_UPPER")
    assert total(found) == same


def test_transposed_convolutions():
    x, w = (1, 4, 5, 5), (4, 6, 3, 3)
    expected = of_jax(
        lambda x, w: conv(x, w.swapaxes(0, 1), window_strides=(1, 1), padding=((1, 1), (1, 1)),
                          lhs_dilation=(2, 2)),
        x, w,
    )  # fmt: skip
    found = work(onnx, "ConvTranspose", [x, w], strides=[2, 2], pads=[1, 1, 1, 1])
    assert total(found) == expected
    operands = [(6, 3, 3, 4), (1, 5, 5, 4)]
    options = {"padding": 1, "stride_w": 2, "stride_h": 2}
    facts = {
        "size": Fact((4,), "int32", np.array([1, 11, 11, 6], object)),
        "w": Fact(operands[0], "float32"),
        "x": Fact(operands[1], "float32"),
    }
    operation = Operation("TRANSPOSE_CONV", ["size", "w", "x"], ["out"], options)
    graph = Graph([], ["out"], [operation], facts)
    found = work_of_program(Program(graph, {}), {}, tflite.LANGUAGE)
    assert total(found) == 2 * 25 * 9 * 4 * 6  # every element meets the whole kernel


def test_windows_and_reductions():
    pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    assert total(work(onnx, "MaxPool", [(1, 3, 8, 8)], **pool)) == 3 * 16 * 3
    found = work(tflite, "AVERAGE_POOL_2D", [(1, 8, 8, 3)], padding=1, width=2, height=2,
                 stride_w=2, stride_h=2)  # fmt: skip
    assert total(found) == 3 * 16 * 3
    assert total(work(onnx, "ReduceSum", [(4, 6)], values=[[1]])) == 20
    assert total(work(tflite, "SUM", [(4, 6)], values=[[1]])) == 20


@pytest.mark.parametrize("language", [onnx, tflite], ids=WRITERS)
def test_what_is_not_known_is_said_and_not_zero(language):
    assert work(language, "Mystery", [(2, 3)]).uncounted == {"Mystery"}
    name = {onnx: "Add", tflite: "ADD"}[language]
    found = work(language, name, [(2, None), (2, None)])
    assert found.uncounted == {f"{name} (of sizes that only a call knows)"}


def test_functions_that_call_each_other_without_end_are_told():
    body = Graph([], [])
    body.operations.append(Operation("IF", [], [], {}, {"then_subgraph": body}))
    with pytest.raises((ValueError, RecursionError)):
        work_of_program(Program(body, {}), {}, tflite.LANGUAGE)


def test_products_of_ragged_groups():
    def by_groups(x, w):
        return jax.lax.ragged_dot(x, w, jnp.array([4, 3], jnp.int32))

    assert of_jax(by_groups, (7, 5), (2, 5, 3)) == 2 * 7 * 5 * 3
    weights = jax.ShapeDtypeStruct((2, 5, 3), jnp.float32)
    of_weights = jax.make_jaxpr(jax.grad(lambda w, x: by_groups(x, w).sum()))(
        weights, jax.ShapeDtypeStruct((7, 5), jnp.float32)
    )
    found = work_of(of_weights)
    assert total(found) >= 2 * 7 * 5 * 3 and not found.uncounted
