"""Loops in the form that onnxruntime and OpenVINO run right."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

from pax_export.export import load, spec, to_onnx
from pax_export.export.formats.onnx.graph import all_nodes, bodies, read_in
from tests.closeness import assert_close


def _back(x):
    outside = jnp.exp(x.mean(0))
    return lax.scan(lambda c, row: (c + row * outside, c), jnp.zeros(3), x, reverse=True)


def _nested(x):
    row = lambda c, each: (c + each, c)  # noqa: E731
    return lax.scan(lambda c, each: (c + each, lax.scan(row, 0.0, each * c)), jnp.zeros(3), x)


def _row_is_state(x):
    return lax.scan(
        lambda c, row: (jnp.concatenate([c[1:], row[None]]), c.sum(0)), jnp.ones((4, 3)), x
    )


def _slope(x):
    """The numbers that the steps add up are in no result."""
    step = lambda c, _: (jnp.sin(c) * x[0], (c**2).sum())  # noqa: E731
    return jax.grad(lambda c: lax.scan(step, c, None, length=3)[0].sum())(jnp.ones(3))


FORMS = {
    "sum": (lambda x: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(3), x), ["Scan"]),
    "backwards": (_back, ["Scan"]),
    "counted": (lambda x: lax.fori_loop(0, 5, lambda i, c: c + i * x[0], jnp.zeros(3)), ["Loop"]),
    "drawn backwards": (
        lambda x: lax.scan(lambda c, _: (c * 0.5 + x[0], c), jnp.ones(3), length=4, reverse=True),
        ["Scan"],
    ),
    "nested": (_nested, ["Loop", "Scan"]),
    "row is state": (_row_is_state, ["Loop"]),
    "row is unread": (lambda x: lax.scan(lambda c, row: (c * 2, c), jnp.ones(3), x), ["Scan"]),
    "all but one": (
        lambda x: lax.scan(lambda c, row: (row, c * row), jnp.ones(3), x[:-1], reverse=True),
        ["Loop"],
    ),
    "stacked numbers": (
        lambda x: lax.scan(lambda c, _: (jnp.sin(c), c.sum()), x, length=5),
        ["Scan"],
    ),
    "slope": (_slope, ["Scan", "Scan"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_body_has_its_form(tmp_path, name):
    function, form = FORMS[name]
    others = ["openvino"] if find_spec("openvino") else []
    to_onnx(function, tmp_path / "m.onnx", spec("n, 3"), runtimes=others)
    graph = onnx.load(tmp_path / "m.onnx").graph
    loops = [node for node in all_nodes(graph.node) if node.op_type in ("Scan", "Loop")]
    assert [node.op_type for node in loops] == form
    stored = {each.name for each in graph.initializer}
    for (body,) in (bodies(node) for node in loops if node.op_type == "Scan"):
        made = {name for node in all_nodes(body.node) for name in node.output}
        read = {name for node in body.node for name in read_in(node)}
        assert read <= made | stored | {each.name for each in body.input}
        # Gathered from a single row, nothing of the place would be read in OpenVINO.
        single = {name for node in body.node if node.op_type == "Unsqueeze" for name in node.output}
        assert single.isdisjoint(n.input[0] for n in body.node if n.op_type == "Gather")
    loaded = load(tmp_path / "m.onnx")
    for rows in (1, 4):
        x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
        for found, wanted in zip(jax.tree.leaves(loaded(x)), jax.tree.leaves(function(x))):
            assert_close(found, wanted)


FUNCTIONS = {name: function for name, (function, _) in FORMS.items()} | {
    "branched": lambda x: lax.cond(
        x[0, 0] > 0, lambda x: x[:, None] - 1, lambda x: x[None].swapaxes(0, 1), x
    ),
    "until": lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x[:, None].sum(1) + 1, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", ["n, 3", "4, 3"])
def test_inference_finds_a_shape_for_every_value(tmp_path, name, shape):
    """IREE's importer takes others for scalars."""
    to_onnx(FUNCTIONS[name], tmp_path / "m.onnx", spec(shape), validate=False)
    model = onnx.load(tmp_path / "m.onnx")
    graphs = [onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph]
    for graph in graphs:
        graphs.extend(body for node in graph.node for body in bodies(node))
    known = {each.name for graph in graphs for each in (*graph.input, *graph.output)}
    inner = [each for graph in graphs for each in graph.value_info]
    known.update(each.name for each in inner if each.type.tensor_type.HasField("shape"))
    assert {name for node in all_nodes(graphs[0].node) for name in node.output} <= known


def _window(x):
    at = (x[0, 0].astype(int), 0)
    return -lax.dynamic_slice(x, at, (2, 3)), -lax.dynamic_update_slice(x, x[:1], at)


def test_windows_at_computed_places_have_their_sizes(tmp_path):
    to_onnx(_window, tmp_path / "m.onnx", spec("4, 3"))
    entries = onnx.load(tmp_path / "m.onnx").graph.value_info
    sizes = [[each.dim_value for each in e.type.tensor_type.shape.dim] for e in entries]
    assert sizes == [[2, 3], [4, 3]]


def test_uint32_is_shifted_as_it_is(tmp_path):
    """Its bits are those of an int32, also the first one."""

    def shifted(x):
        ways = (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
        sizes = 0, 1, 7, 8, 23, 31, 32, 40
        made = [way(x, jnp.uint32(by)) for way in ways for by in sizes]
        return made + [lax.shift_right_arithmetic(x.view(jnp.int32), by) for by in sizes]

    to_onnx(shifted, tmp_path / "m.onnx", spec("n", "uint32"))
    assert "BitShift" not in {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    x = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF, 12345678], np.uint32)
    for found, wanted in zip(load(tmp_path / "m.onnx")(x), shifted(jnp.asarray(x))):
        np.testing.assert_array_equal(found, wanted)


def test_nothing_is_greater_than_another(tmp_path):
    """In OpenVINO NaN would be."""
    function = lambda x: (x > 1, x >= 2, jnp.where(x > 0.5, x, 0), jnp.argmax(x))  # noqa: E731
    to_onnx(function, tmp_path / "m.onnx", spec("n"))
    kinds = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {"Less", "LessOrEqual"} <= kinds and not kinds & {"Greater", "GreaterOrEqual"}
    x = np.array([np.nan, 1, 2, 3, 0.5], np.float32)
    for found, wanted in zip(load(tmp_path / "m.onnx")(x), function(x)):
        np.testing.assert_array_equal(found, wanted)


def test_results_of_a_scan_that_nothing_reads_are_not_stacked(tmp_path):
    to_onnx(_slope, tmp_path / "m.onnx", spec("n, 3"))
    graph = onnx.load(tmp_path / "m.onnx").graph
    bodies_read = [body for node in graph.node if node.op_type == "Scan" for body in bodies(node)]
    made = {node.op_type for body in bodies_read for node in body.node}
    assert bodies_read and "ReduceSum" not in made
