"""The distribution: what it is made of, and that its parts agree."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pax_export
from release import contents, sources

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sources as a release copies them, with our tests beside them, an sdist and a wheel."""
    source = sources.copy(ROOT, tmp_path_factory.mktemp("built") / "source")
    shutil.copytree(ROOT / "tests", source / "tests")
    out = source.parent / "out"
    for what in ("build_sdist", "build_wheel"):
        code = f"import setuptools.build_meta as b; b.{what}({str(out)!r})"
        command = [sys.executable, "-c", code]
        subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=900)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, sdist, wheel


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built[2]) as archive:
        yield archive


def test_wheel_holds_every_source_file_and_the_typing_marker(wheel):
    assert contents.python_files(ROOT) <= set(wheel.namelist())


def test_wheel_holds_nothing_but_the_package(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pax_export"}


def test_a_release_would_take_both(built):
    source, sdist, wheel = built
    assert contents.wheel_faults(wheel, source, pax_export.__version__) == []
    assert contents.sdist_faults(sdist, source, pax_export.__version__) == []


def test_wheel_metadata(wheel):
    metadata = contents.read(wheel, ".dist-info/METADATA").splitlines()
    assert "Name: pax-export" in metadata
    assert f"Version: {pax_export.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    hard = {
        line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    names = {line.split()[1].split(">")[0] for line in hard}
    assert names == {"jax", "jaxlib", "numpy", "jmp", "google-crc32c"}
    assert "Apache License" in contents.read(wheel, "/LICENSE")


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


def test_one_page_lists_all_extras():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "extras.md").read_text(), re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(extras())


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
