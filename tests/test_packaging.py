"""The distribution: what it is made of, and that its parts agree."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pax_export

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, as a release would be."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("pax_export", "tests"):
        shutil.copytree(ROOT / package, source / package)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, source], check=True, timeout=900)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def read(archive, ending):
    (name,) = (name for name in archive.namelist() if name.endswith(ending))
    return archive.read(name).decode()


def test_wheel_holds_every_source_file_and_the_typing_marker(wheel):
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("pax_export/**/*.py")}
    assert sources | {"pax_export/py.typed"} <= set(wheel.namelist())


def test_wheel_holds_nothing_but_the_package(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pax_export"}


def test_wheel_metadata(wheel):
    metadata = read(wheel, ".dist-info/METADATA").splitlines()
    assert "Name: pax-export" in metadata
    assert f"Version: {pax_export.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    hard = {
        line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    names = {line.split()[1].split(">")[0] for line in hard}
    assert names == {"jax", "jaxlib", "numpy", "jmp"}
    assert "Apache License" in read(wheel, "/LICENSE")


def test_wheel_installs_the_command(wheel):
    assert "pax-export = pax_export.cli:main" in read(wheel, "entry_points.txt")


def extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return dict(config["options.extras_require"])


def test_errors_name_extras_that_exist():
    """`require(package, extra, purpose)` tells the user to install an extra."""
    import ast

    named = set()
    for path in (ROOT / "pax_export").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require":
                values = dict(zip(("package", "extra"), node.args, strict=False))
                values |= {keyword.arg: keyword.value for keyword in node.keywords}
                named.add(ast.literal_eval(values["extra"]))
    assert named <= set(extras())


def commands(text):
    """The lines of a shell text that call Python."""
    return [line for line in text.splitlines() if line.startswith("python3 ")]


def test_ci_runs_exactly_the_test_command_of_the_readme():
    main_job, tests = commands((ROOT / "README.md").read_text())
    assert main_job.endswith("examples/digits.py")
    assert commands((ROOT / ".ci" / "run").read_text()) == [tests]


def test_ci_script_can_be_run_and_stops_at_the_first_failure():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text().splitlines()
