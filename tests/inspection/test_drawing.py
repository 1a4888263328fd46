"""`pax.inspection.draw`: modules as nodes, arrays as edges."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import spec
from pax_export.inspection import draw
from tests.refusals import refused


class Residual(pax.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pax.Linear(4, 4), pax.Linear(4, 4)

    def __call__(self, x, scale):
        return x + scale * self.second(jax.nn.relu(self.first(x)))


def test_a_net_with_constants_is_drawn():
    sizes = {"vocab_size": 9, "dim": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4}
    lm = pax.nets.Decoder(pax.nets.DecoderConfig.llama(**sizes))
    drawn = names(draw(lm, jax.ShapeDtypeStruct((1, 3), "int32")))
    assert drawn[0] == "tokens" and "embed" in drawn and "head" in drawn


def names(drawing):
    return [node.path or node.title for node in drawing.nodes]


def arrows(drawing):
    """The edges by the names of what they join."""
    known = names(drawing)
    return {(known[a], known[b]): texts for a, b, texts in drawing.edges}


def test_modules_operations_inputs_and_outputs():
    drawing = draw(Residual(), spec("batch, 4"), spec(()))
    assert set(names(drawing)) == {"x", "scale", "first", "relu", "second", "mul", "add", "output"}
    found = arrows(drawing)
    assert found["x", "first"] == ("float32[batch,4]",)
    assert ("x", "add") in found and ("mul", "add") in found and ("scale", "mul") in found
    assert ("first", "second") not in found


def test_depth():
    net = pax.Sequential(Residual2(), pax.Linear(4, 2))
    assert names(draw(net, spec("b, 4"))) == ["x", "modules.0", "modules.1", "output"]
    deeper = names(draw(net, spec("b, 4"), depth=2))
    assert "modules.0.first" in deeper and "modules.0" not in deeper


def test_a_function_as_a_layer_has_its_name():
    pytest.importorskip("fast_sugiyama")
    drawing = draw(pax.Sequential(pax.Linear(4, 4), lambda x: x + 1), spec("b, 4"))
    assert [node.title for node in drawing.nodes] == ["x", "Linear", "Lambda(<lambda>)", "output"]
    ElementTree.fromstring(drawing.to_svg())


class Residual2(Residual):
    def __call__(self, x):
        return super().__call__(x, 2.0)


def test_modules_inside_of_scan_and_jit_are_found():
    class Outer(pax.Module):
        def __init__(self):
            super().__init__()
            self.stack = pax.transforms.Scan(pax.Linear, length=3, scan_output=False)(4, 4)
            self.head = pax.Linear(4, 2)

        def __call__(self, x):
            return jax.jit(lambda head, x: head(x))(self.head, self.stack(x))

    drawing = draw(Outer(), spec("b, 4"))
    found = [name for name in names(drawing) if "." in name or name in ("stack", "head")]
    assert found == ["stack", "head"]
    assert ("stack", "head") in arrows(drawing)


def test_a_graph_and_a_recurrent_net():
    lstm = pax.LSTM(4, 8)
    state = lstm.initial_state(2)
    drawing = draw(lstm, state, jnp.ones((2, 4)))
    assert [node.kind for node in drawing.nodes].count("input") == 3


def test_svg_is_well_formed_and_the_same_each_time(tmp_path):
    net = pax.nets.ResNet18(3, 10).eval()
    drawing = draw(net, spec("batch, 3, 32, 32"), depth=2)
    path = drawing.save_svg(tmp_path / "net.svg")
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    boxes = [each for each in root.iter() if each.tag.endswith("rect")]
    assert len(boxes) == len(drawing.nodes)
    assert drawing.to_svg() == draw(net, spec("batch, 3, 32, 32"), depth=2).to_svg()
    assert drawing._repr_svg_() == drawing.to_svg()
    drawing.save_svg(path, overwrite=True)
    with refused(OSError, "already"):
        drawing.save_svg(path)


def test_a_net_of_one_module_and_no_edges():
    assert draw(pax.Linear(2, 3), spec("b, 2")).to_svg()
    constant = pax.Lambda(lambda x: jnp.ones(3))
    assert draw(constant, spec("b, 2")).to_svg()


def test_wrong_input():
    with refused(ValueError, "requires"):
        draw(pax.Linear(2, 3))
    with refused(ValueError, "depth"):
        draw(pax.Linear(2, 3), spec("b, 2"), depth=0)
    with refused(TypeError, "module"):
        draw(3, spec("b, 2"))


def test_labels_of_edges_are_within_the_drawing():
    """The label is wider than the boxes that its edge joins."""
    pytest.importorskip("fast_sugiyama")

    class Two(pax.Module):
        def __call__(self, x):
            return x[0], x[1]

    class Outer(pax.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Two(), Pair()

        def __call__(self, x):
            return self.b(*self.a(x))

    class Pair(pax.Module):
        def __call__(self, x, y):
            return x + y

    root = ElementTree.fromstring(draw(Outer(), spec("2, batch, 1000, 1000")).to_svg())
    left, _, width, _ = map(float, root.get("viewBox").split())
    labels = [text for text in root.iter() if text.get("class") == "edge"]
    assert max(len(text.text) for text in labels) > 20
    for text in labels:
        half = len(text.text) * 6 / 2  # letters of 10 pixels are 6 wide
        assert left <= float(text.get("x")) - half and float(text.get("x")) + half <= left + width


def test_the_style_holds_for_drawings_alone():
    """A notebook puts the drawing into its page."""
    pytest.importorskip("fast_sugiyama")
    root = ElementTree.fromstring(draw(Residual2(), spec("b, 4")).to_svg())
    style = next(each.text for each in root.iter() if each.tag.endswith("style"))
    selectors = [each for rule in style.split("}")[:-1] for each in rule.split("{")[0].split(",")]
    assert selectors and all(each.strip().startswith(".pax-drawing ") for each in selectors)
    assert root.get("class") == "pax-drawing"
