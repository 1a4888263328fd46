"""The tutorials are whole notebooks; `tox -e docs` runs them, and ends where a cell fails."""

from __future__ import annotations

import ast
import configparser
import re
import runpy
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(file for file in FOLDER.glob("*.md") if file.name != "index.md")
_NO_CODE = re.compile(r"\A%%writefile .*\n")
_CELL = re.compile(r"^```\{code-cell\}\n(?P<code>.*?)^```$", re.M | re.S)


def text_of(tutorial):
    return tutorial.read_text(encoding="utf-8")


def cells(tutorial):
    """The code of each cell; of a cell that writes a file, the file."""
    return [re.sub(_NO_CODE, "", match["code"]) for match in _CELL.finditer(text_of(tutorial))]


def test_each_is_listed():
    index = text_of(FOLDER / "index.md")
    assert len(TUTORIALS) >= 4
    for tutorial in TUTORIALS:
        assert f"\n{tutorial.stem}\n" in index.partition("```{toctree}")[2]
        assert f"[]({tutorial.name})" in index
    assert "\ntutorials/index\n" in text_of(ROOT / "docs" / "index.md")


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda file: file.stem)
def test_it_is_a_notebook_of_which_every_cell_runs(tutorial):
    text = text_of(tutorial)
    assert text.startswith("---\njupytext:\n") and "\n  name: python3\n" in text.split("---\n")[1]
    assert len(cells(tutorial)) == text.count("```{code-cell}") > 4
    assert "```python" not in text  # would be no cell
    for word in ("raises-exception", "skip-execution", "allow_errors", ":tags:", "mystnb:"):
        assert word not in text


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda file: file.stem)
def test_its_code_can_be_read_at_once(tutorial):
    for code in cells(tutorial):
        ast.parse(code)
        lines = code.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 100, code


def test_a_cell_that_fails_ends_the_build():
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert conf["nb_execution_mode"] == "force"
    assert conf["nb_execution_raise_on_error"] is True
    assert conf.get("nb_execution_excludepatterns", []) == []
    assert not conf.get("nb_execution_allow_errors", False)


def test_the_first_cell_installs_what_the_others_import():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = "\n".join(config["options.extras_require"][name] for name in ("all", "examples"))
    for name in ("all", "examples"):
        for nested in re.findall(r"pax-export\[(.*)\]", config["options.extras_require"][name]):
            extras += "\n".join(
                config["options.extras_require"][each] for each in nested.split(",")
            )
    given = set(re.findall(r"^[\w-]+", extras + config["options"]["install_requires"], re.M))
    known = {"pax_export", "jax", "numpy", "IPython", "PIL"} | sys.stdlib_module_names
    for tutorial in TUTORIALS:
        trees = [ast.parse(code) for code in cells(tutorial) if not code.startswith("%")]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in {name.partition(".")[0] for name in names} - known:
            packages = packages_distributions().get(name, [name])
            assert given & {each.lower().replace("_", "-") for each in packages}, name
