"""What notebooks show: HTML that is escaped, has no script and fetches nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import spec
from tests.processes import printed

NASTY = "<script>alert('x')</script>"


def cells(value):
    """The texts of all cells and lines; the HTML is well formed, and does nothing."""
    html = value._repr_html_()
    assert "<script" not in html and "http" not in html
    tree = ElementTree.fromstring(html)
    return [each.text or "" for each in tree.iter() if each.tag in ("td", "th", "div", "b")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    net = pax.Sequential(pax.Linear(3, 2), jax.nn.relu).eval()
    return net, folder / "net", pax.export.to_stablehlo(net, folder / "net", spec("batch, 3"))


def test_modules_without_a_table_are_shown_by_their_repr():
    flat = pax.experimental.Flattener(net=pax.Linear(2, 3))  # knows no parameters
    assert flat._repr_html_() is None
    assert repr(flat) == "Flattener(values=[net], elements=9, mode=train)"


def test_a_report_of_an_export(exported):
    report = exported[2]
    found = cells(report)
    assert str(report).splitlines()[0] in found
    assert "serving_default" in found and "variables" in found and "validated" in found
    words = " ".join(found).split()
    assert all(word in words for word in str(report).split())


def test_texts_of_others_are_escaped(exported):
    import dataclasses

    report = dataclasses.replace(exported[2], model=NASTY, versions={NASTY: NASTY})
    assert any(NASTY in text for text in cells(report))
    assert any(NASTY in text for text in cells(spec("b, 3", name=NASTY)))


def test_specs():
    assert "float32[batch, 3]" in cells(spec("batch, 3"))
    assert "x: int32[batch, ?, 2]" in cells(spec(("batch", None, 2), "int32", name="x"))


def test_tables_of_sharding():
    mesh = pax.sharding.abstract_mesh(data=4)
    found = cells(pax.sharding.table(pax.Linear(8, 2), mesh, {"weight": ("data", None)}))
    assert "P('data', None)" in found and "bias" in found
    assert "no rule is for, so replicated: bias" in found


def test_adopted_and_loaded_models():
    file = {"fc.weight": np.ones((3, 2), "f4"), "fc.bias": np.ones(3, "f4"), NASTY: np.ones(9)}
    _, report = pax.weights.adopt(pax.Linear(2, 3), file, ignore=[NASTY])
    found = cells(report)
    assert "<- fc.weight" in found and "transposed" in found
    assert any(NASTY in text for text in found)
    loaded = pax.weights.LoadReport(("a",), ("b",), (), {"c": "float32[2] in the file"})
    assert "missing from the file: b" in cells(loaded)


def test_differences_and_statistics(exported):
    net, path, _ = exported
    found = cells(pax.inspection.diff(net, net.set(0, pax.Linear(3, 4).eval())))
    assert "modules.0.weight" in found and "reshaped" in found
    assert "no difference" in cells(pax.inspection.diff(net, path))
    assert "modules.0" in cells(pax.debug.statistics(net, np.ones((1, 3), np.float32)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # treescope goes through numpy's names
def test_treescope_shows_a_module():
    treescope = pytest.importorskip("treescope")
    net = pax.Sequential(pax.Linear(3, 2), jax.nn.relu, name="small").eval()
    text = "".join(treescope.render_to_text(net).split())
    assert text.startswith("Sequential(name='small',training=False,modules=(Linear(training=False,")
    assert "weight=" in text and "_training" not in text
    frozen = pax.freeze_parameters(pax.nets.Transformer(8, 2, 1, 0.1))
    html = treescope.render_to_html(frozen, compressed=False)
    assert "CausalSelfAttention" in html
    assert "ShapeDtypeStruct" in treescope.render_to_text(
        jax.eval_shape(lambda: pax.Linear(2**20, 2**20))
    )


def test_a_session_without_treescope_does_not_load_it():
    code = (
        "import sys, pax_export as pax; pax.Linear(1, 1)._repr_html_();"
        "print('treescope' in sys.modules)"
    )
    assert printed(code) == "False\n"
