"""A format of another package, built, installed and used as the guide has it."""

import importlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.cli import main
from pax_export.export import Report, load, spec
from pax_export.export.formats import FormatProgram, export_as
from tests.closeness import assert_close
from tests.docs.pages import ROOT

GUIDE = ROOT / "docs" / "guide" / "formats.md"
_FILE = re.compile(r"^```\w+\n# (?P<path>\S+\.\w+)\n(?P<text>.*?)^```", re.M | re.S)
MODEL = """
import jax, pax_export as pax

def make():
    return pax.Sequential(
        pax.Linear(4, 8), jax.nn.gelu, pax.LayerNorm(8), pax.Linear(8, 2), jax.nn.softmax
    ).eval()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for match in _FILE.finditer(GUIDE.read_text(encoding="utf-8")):
        path = source / match["path"]
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(match["text"])
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", target, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def numpy_program(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    yield importlib.import_module("numpy_program")
    for name in ("numpy_program", "numpy_program.runtime"):
        sys.modules.pop(name, None)


def test_an_installed_format_on_the_command_line(numpy_program, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models.py").write_text(MODEL)
    np.save(tmp_path / "x.npy", np.ones((3, 4), np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    batch = ("--input", "batch, 4")
    assert main(["export", "my_models:make", "net", "--target", "numpy_program", *batch]) == 0
    assert "Sequential as a numpy program" in capsys.readouterr().out
    report = Report.read(tmp_path / "net")
    assert (report.target, report.validated) == ("numpy_program", "here")
    assert report.details["runs_in"] == "numpy"
    assert main(["run", "net", "--input", "x.npy"]) == 1
    assert "fix: --trusted" in capsys.readouterr().err
    assert main(["run", "net", "--input", "x.npy", "--trusted"]) == 0
    assert "output: float32[3, 2]" in capsys.readouterr().out


def test_an_operation_that_the_format_lacks(numpy_program, tmp_path):
    net = pax.Sequential(pax.Linear(4, 4), jnp.sort).eval()
    with pytest.raises(pax.errors.UnsupportedOperationError) as caught:
        numpy_program.to_numpy_program(net, tmp_path / "net", spec("n, 4"))
    assert "sort" in str(caught.value)
    assert "modules.1" in caught.value.where or ".py" in caught.value.where
    assert not (tmp_path / "net").exists()


def test_programs_have_their_arrays_by_name(numpy_program, tmp_path):
    """Small constants, weights that are tied, and two signatures."""
    weight = jnp.ones((3, 3))
    params = {"first": weight, "second": weight}
    seen: dict[str, FormatProgram] = {}

    def write(place, programs):
        seen.update({each.key: each for each in programs})
        return numpy_program.write(place, programs)

    def function(params, x):
        return x @ params["first"] + x @ params["second"] * jnp.array([1.0, 2.0, 3.0])

    def double(params, x):
        return 2 * x

    export_as(
        numpy_program.FORMAT, write, (params, function), tmp_path / "net",
        {"one": spec("n, 3"), "two": spec("3")}, methods={"one": function, "two": double},
    )  # fmt: skip
    assert list(seen) == ["one", "two"]
    assert "first" in seen["one"].weights
    assert "second" not in seen["one"].weights
    jaxpr, program = seen["one"].jaxpr.jaxpr, seen["one"]
    assert len(jaxpr.invars) == len(program.weights) + len(program.inputs)
    assert [tuple(each.shape) for each in program.weights.values()].count((3,)) == 1
    assert str(program.inputs["x"].shape[0]) == "n"
    x = np.eye(3, dtype=np.float32)
    call = load(tmp_path / "net", trusted=True).signatures["one"]
    assert_close(call(x), function(params, x), rtol=1e-6)
