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
from release import contents, sources

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sources as a release copies them, with our tests beside them, and a wheel of them."""
    source = sources.copy(ROOT, tmp_path_factory.mktemp("built") / "source")
    shutil.copytree(ROOT / "tests", source / "tests")
    out = source.parent / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, source], check=True, timeout=900)
    (path,) = out.glob("*.whl")
    return source, path


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built[1]) as archive:
        yield archive


def test_wheel_holds_every_source_file_and_the_typing_marker(wheel):
    assert contents.python_files(ROOT) <= set(wheel.namelist())


def test_wheel_holds_nothing_but_the_package(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pax_export"}


def compiled_names(archive):
    return [name for name in archive.namelist() if contents.is_compiled(name)]


def test_a_release_would_take_the_wheel(built, wheel):
    source, path = built
    if not compiled_names(wheel) or sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("no compiler here, or a Python without the stable interface")
    assert not real_faults(contents.wheel_faults(path, source, pax_export.__version__))


def real_faults(found):
    """Without those that come of how the Python of these tests was linked itself."""
    return [fault for fault in found if "names the home folder" not in fault]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A source release, the names in it, and those in a wheel made of it without a compiler."""
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

    source = sources.copy(ROOT, out / "source")
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")  # setuptools would take it along
    sdist = build(source, "build_sdist")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(out, filter="data")
    with zipfile.ZipFile(build(out / names[0].split("/")[0], "build_wheel")) as archive:
        return source, sdist, names, archive.namelist()


def test_a_source_release_builds_without_a_compiler(release):
    _, _, inside, names = release
    ends = {name.split("/", 1)[-1] for name in inside}
    assert {"setup.py", "pax_export/core/_round_trip.c"} <= ends
    assert "pax_export/core/_tree.py" in names
    assert not [name for name in names if contents.is_compiled(name)]


def test_a_release_would_take_the_source_release(release):
    source, sdist, _, _ = release
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
