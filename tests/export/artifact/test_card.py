"""The card of an export: a page for people beside the report, and the calls on it."""

import dataclasses
import html
import json
import os
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.cli import main
from pax_export.errors import ExportPathError, InvalidArgumentTypeError
from pax_export.export import load, spec
from pax_export.export.artifact.card import drawing_in, page
from pax_export.export.artifact.report import ArrayInfo, Report
from tests.closeness import assert_close
from tests.refusals import refused

CARD = "pax_export.html"
PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}
MODEL = PARAMS, lambda p, x, shift: {"y": x @ p["w"] + shift["by"]}
INPUTS = (spec("batch, 3"), {"by": spec("2")})
METHODS = {"serving_default": MODEL[1], 'half of "it"': lambda p, x: x[: x.shape[0] // 2]}


def bundle(path, **options):
    return pax.export.to_stablehlo(MODEL, path, INPUTS, validate=False, **options)


def two(path):
    inputs = {"serving_default": INPUTS, 'half of "it"': spec("2*n, 3")}
    return pax.export.to_saved_model(MODEL, path, inputs, methods=METHODS)


WRITERS = {
    "bundle": lambda path: bundle(path),
    "saved": two,
    "net.tflite": lambda path: pax.export.to_tflite(MODEL, path, INPUTS),
    "net.onnx": lambda path: pax.export.to_onnx(MODEL, path, INPUTS),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


def card_of(path: Path) -> Path:
    return path / CARD if path.is_dir() else path.with_name(path.name + ".html")


def snippets(text: str) -> dict[str, str]:
    found = re.findall(r"<h3>(.*?)</h3>\s*<pre>(.*?)</pre>", text, re.S)
    return {html.unescape(title): html.unescape(code) for title, code in found}


@pytest.mark.parametrize("name", WRITERS)
def test_python_of_the_card_runs(exports, monkeypatch, name):
    path = exports / name
    monkeypatch.chdir(path if path.is_dir() else exports)
    calls = snippets(card_of(path).read_text())
    python = [code for title, code in calls.items() if title.startswith("Python")]
    assert len(python) == {"bundle": 1, "saved": 4}.get(name, 2)
    for code in python:
        exec(code, {})  # it would raise
    output: dict = {}
    exec(python[0], output)
    assert_close(output["output"]["y"], np.zeros((1, 2)))


def test_commands_of_the_card_run(exports, monkeypatch, tmp_path, capsys):
    shutil.copytree(exports / "saved", tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    np.save("input_0.npy", np.ones((2, 3), np.float32))
    np.save("input_1.npy", np.ones(2, np.float32))
    lines = snippets(Path(CARD).read_text())["Command line"].splitlines()
    assert [shlex.split(line)[:2] for line in lines] == [
        ["pax-export", "inspect"], ["pax-export", "validate"],
        ["pax-export", "run"], ["pax-export", "run"],
    ]  # fmt: skip
    for line in (lines[0], *lines[2:]):
        assert main(shlex.split(line)[1:]) == 0
        capsys.readouterr()
    assert np.load("outputs.npz")["output"].shape == (1, 3)


def test_contents_of_the_card(exports):
    text = (exports / "saved" / CARD).read_text()
    for said in (
        "in this process", "largest difference of any output", "weights", "24 B",
        "TensorFlow 2.15 and newer", "float32[batch, 3]", "pax_export.json",
    ):  # fmt: skip
        assert said in html.unescape(text).replace("variables", "weights")
    assert "seconds" not in text and str(exports) not in text
    assert "SHA-256" in card_of(exports / "net.tflite").read_text()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


HOSTILE = ['"><script>alert(1)</script>', "'; import os #", "*/ \\", "a\nb", "\ud800", "$(x)"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("target", ["saved_model", "tflite", "onnx", "stablehlo"])
def test_no_name_of_a_model_is_more_than_text(exports, name, target):
    report = Report.read(exports / "bundle")
    (info,) = report.signatures.values()
    entry = dataclasses.replace(info.inputs[0], name=name, path=name)
    hostile = dataclasses.replace(
        info,
        inputs=(entry,),
        outputs=(ArrayInfo(name, name, (name[:1],), "float32"),),
        arguments={name: {"dict": [[name, {"leaf": name}]]}},
        positional=(),
        result={"leaf": name},
        constraints=(),
    )
    stored = tuple(
        dataclasses.replace(each, name=name, leaves=(name,)) for each in report.variables
    )
    report = dataclasses.replace(
        report, target=target, model=name, signatures={name: hostile}, variables=tuple(stored),
        details={"runs_in": name, "sha256": name}, versions={name: name},
    )  # fmt: skip
    text = page(report, name).encode("utf-8", "backslashreplace").decode()
    seen = Tags()
    seen.feed(text)
    assert seen.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "table",
        "tr", "th", "td", "pre", "b", "details", "summary",
    }  # fmt: skip
    assert seen.attributes <= {"lang", "charset", "http-equiv", "content", "class"}
    calls = snippets(text)
    for title, code in calls.items():
        if title.startswith("Python"):
            compile(code.encode("utf-8", "backslashreplace"), "card", "exec")


def test_without_a_card(tmp_path):
    bundle(tmp_path / "net", card=False)
    assert not (tmp_path / "net" / CARD).exists()
    assert CARD not in (tmp_path / "net/SHA256SUMS").read_text()
    load(tmp_path / "net")


def onnx(path, **options):
    return pax.export.to_onnx(MODEL, path, INPUTS, validate=False, **options)


def test_the_card_of_a_file_is_removed_with_it(tmp_path):
    path = tmp_path / "net.onnx"
    onnx(path)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.html"]
    first = card_of(path).read_bytes()
    path.unlink()
    onnx(path)  # an old card is in nobody's way
    assert card_of(path).read_bytes() == first
    onnx(path, overwrite=True, card=False)
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_a_page_of_somebody_else_is_never_replaced(tmp_path):
    card_of(tmp_path / "net.onnx").write_text("<p>mine</p>")
    for overwrite in (False, True):
        with refused(ExportPathError, "card=False", where=str(tmp_path / "net.onnx.html")):
            onnx(tmp_path / "net.onnx", overwrite=overwrite)
    onnx(tmp_path / "net.onnx", card=False)
    assert card_of(tmp_path / "net.onnx").read_text() == "<p>mine</p>"
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.html"]


@pytest.mark.parametrize("name", ["bundle", "saved"])
def test_a_card_may_be_deleted_and_not_changed(exports, tmp_path, name):
    path = tmp_path / "net"
    shutil.copytree(exports / name, path)
    assert CARD in (path / "SHA256SUMS").read_text()
    (path / CARD).unlink()
    load(path)
    (path / CARD).write_text("<script>")
    with refused(ExportPathError, CARD):
        load(path)


class Drawing:
    def to_svg(self):
        return "<svg>a drawing</svg>\n"


def test_the_drawing_stays_when_a_bundle_is_renewed(tmp_path):
    bundle(tmp_path / "net", card=Drawing())
    before = (tmp_path / "net" / CARD).read_text()
    assert drawing_in(before) == "<svg>a drawing</svg>\n"
    pax.export.renew(tmp_path / "net")
    assert (tmp_path / "net" / CARD).read_text() == before
    load(tmp_path / "net")


def test_what_card_may_be(tmp_path):
    with refused(InvalidArgumentTypeError, "pax.inspection.draw", got="card='no'"):
        bundle(tmp_path / "net", card="no")
    assert os.listdir(tmp_path) == []


def test_where_no_sizes_fit_the_page_stands_without_numbers(tmp_path):
    model = {}, lambda p, x: jnp.zeros(8 // (x.shape[0] - 1))
    report = pax.export.to_stablehlo(
        model, tmp_path / "net", spec("n"), constraints=["n >= 3"], validate=False
    )
    (key,) = report.signatures
    impossible = dataclasses.replace(
        report.signatures[key], constraints=("n >= 4", "n <= 3"), sizes=()
    )
    text = page(dataclasses.replace(report, signatures={key: impossible}), None)
    assert "np.zeros(('n',)" in html.unescape(text)


def test_the_command_line_leaves_the_card_out_or_draws_on_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "factory.py").write_text(
        "import pax_export as pax\ndef make():\n    return pax.Sequential(pax.Linear(3, 2))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    line = ["export", "factory:make", "net", "--input", "batch, 3", "--target", "stablehlo"]
    assert main([*line, "--no-card", "--validate", "no"]) == 0
    assert not Path("net", CARD).exists()
    pytest.importorskip("fast_sugiyama")
    assert main([*line, "--drawing", "--overwrite", "--validate", "no"]) == 0
    assert "modules.0" in drawing_in(Path("net", CARD).read_text())
    methods = ["--method", "a=__call__", "--drawing", "--json"]
    capsys.readouterr()
    assert main([*line, *methods]) != 0
    assert "drawn" in capsys.readouterr().err


def test_json_and_page_say_the_same_largest_error(exports):
    report = json.loads((exports / "saved" / "pax_export.json").read_text())
    largest = max(report["largest_error"].values())
    assert f"{largest:.1e}" in (exports / "saved" / CARD).read_text()
