"""The distribution: what it is made of, and that its parts agree."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import pax_export

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, as a release would be."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("pax_export", "tests"):
        built = shutil.ignore_patterns("*.so", "*.pyd")  # in place, for this environment
        shutil.copytree(ROOT / package, source / package, ignore=built)
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


def compiled_names(archive):
    return [name for name in archive.namelist() if name.endswith((".so", ".pyd"))]


def test_wheel_holds_the_compiled_round_trip_for_every_python(wheel):
    if not compiled_names(wheel):
        pytest.skip("no compiler here, or no headers of Python: the wheel goes without")
    (name,) = compiled_names(wheel)
    assert name.startswith("pax_export/core/_round_trip.")
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "-cp311-abi3-" in Path(wheel.filename).name


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The names in a source release, and those in a wheel built from it without a compiler."""
    out = tmp_path_factory.mktemp("release")
    backend = "import setuptools.build_meta as b; print(b.{}({!r}))"
    quiet = {**os.environ, "CC": str(out / "no-compiler"), "CFLAGS": ""}

    def build(directory, what):
        code = backend.format(what, str(out))
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=directory, env=quiet, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return out / done.stdout.splitlines()[-1]

    source = out / "source"
    source.mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(ROOT / "pax_export", source / "pax_export", ignore=ignored)
    with tarfile.open(build(source, "build_sdist")) as archive:
        sources = archive.getnames()
        archive.extractall(out, filter="data")
    with zipfile.ZipFile(build(out / sources[0].split("/")[0], "build_wheel")) as archive:
        return sources, archive.namelist()


def test_a_source_release_builds_without_a_compiler(release):
    sources, names = release
    ends = {name.split("/", 1)[-1] for name in sources}
    assert {"setup.py", "pax_export/core/_round_trip.c"} <= ends
    assert "pax_export/core/_tree.py" in names
    assert not [name for name in names if name.endswith((".so", ".pyd"))]


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
