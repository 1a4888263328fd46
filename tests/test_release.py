"""What stops a release, and what its notes are.

That the true files pass is in `test_packaging.py`; here are files and texts that must not.
"""

from __future__ import annotations

import configparser
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pax_export
from release import ReleaseError, __main__, changelog, contents, refuse, sources, trial

ROOT = Path(__file__).parent.parent
TEXT = """# Changelog

Words.

## [Unreleased]

## [0.2.0] - 2027-01-31

### Added

- Two.

## [0.1.0] - 2026-11-22

- One.
"""


# CHANGELOG ------------------------------------------------------------------


def test_notes_are_those_of_one_version():
    assert changelog.notes(TEXT, "0.2.0") == "### Added\n\n- Two."
    assert changelog.notes(TEXT, "0.1.0") == "- One."
    assert changelog.notes(TEXT, "0.3.0") == ""


def test_a_changelog_that_is_ready():
    assert changelog.faults(TEXT, "0.2.0") == []


@pytest.mark.parametrize(
    "version, changed, message",
    [
        ("0.2.0.dev0", ("", ""), "0.2.0.dev0 is no version to release: write one like 0.1.0"),
        ("0.3.0", ("", ""), r"has version 0.3.0, the newest .* is 0.2.0: write \"## \[0.3.0\] - 2"),
        ("0.1.0", ("", ""), "has version 0.1.0, the newest in CHANGELOG.md is 0.2.0"),
        ("0.2.0", (" - 2027-01-31", ""), r"no date for 0.2.0: write \"## \[0.2.0\] - 2"),
        ("0.2.0", ("2027-01-31", "January"), "no date for 0.2.0"),
        ("0.2.0", ("### Added\n\n- Two.", ""), "CHANGELOG.md says nothing of 0.2.0"),
        ("0.2.0", ("[Unreleased]\n", "[Unreleased]\n\n- New.\n"), "lines under .Unreleased. that"),
    ],
)
def test_unfinished_changelogs_are_refused(version, changed, message):
    (fault,) = changelog.faults(TEXT.replace(*changed), version)
    with pytest.raises(ReleaseError, match=message):
        refuse([fault])


def test_a_changelog_without_versions():
    (fault,) = changelog.faults("# Changelog\n\n## [Unreleased]\n", "0.1.0")
    assert "has version 0.1.0, CHANGELOG.md has none" in fault


def test_our_changelog_begins_with_what_waits_and_has_a_first_version():
    found = changelog.sections((ROOT / changelog.NAME).read_text(encoding="utf-8"))
    assert found[0].version == changelog.UNRELEASED
    assert (found[-1].version, bool(found[-1].notes)) == ("0.1.0", True)


# Sources --------------------------------------------------------------------


def test_the_version_is_read_without_an_import():
    assert sources.version(ROOT) == pax_export.__version__


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit."""

    def git(*arguments):
        about = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *about, *arguments], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "--message", "first")
    return tmp_path, git


def test_a_release_needs_all_in_git(repository):
    root, _ = repository
    assert sources.faults(root, "0.1.0") == []
    (root / "new.py").touch()
    (fault,) = sources.faults(root, "0.1.0")
    assert fault == "git does not have these changes: commit or remove them\n  ?? new.py"


def test_a_version_is_released_once(repository):
    root, git = repository
    git("tag", "--annotate", "v0.1.0", "--message", "0.1.0")
    assert sources.faults(root, "0.1.0") == []
    git("commit", "--allow-empty", "--message", "second")
    (fault,) = sources.faults(root, "0.1.0")
    assert fault.startswith("the tag v0.1.0 is on another commit")
    assert sources.faults(root, "0.2.0") == []


# Contents -------------------------------------------------------------------

VERSION = "0.2.0"
PACKAGE = {"pax_export/__init__.py", "pax_export/py.typed", "pax_export/core/_tree.py"}
METADATA = (
    f"Name: pax-export\nVersion: {VERSION}\n"
    "License-Expression: Apache-2.0\nRequires-Python: >=3.11\n"
)
ENTRIES = "[console_scripts]\npax-export = pax_export.cli:main\n"
GOOD = "pax_export-0.2.0-py3-none-any.whl"


@pytest.fixture
def source(tmp_path):
    """Sources as small as can be."""
    for name in PACKAGE:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "source"


@pytest.fixture
def wheel_faults(source, tmp_path):
    """What is wrong with a wheel of these files."""

    def check(add=(), without=(), name=GOOD, metadata=METADATA, entries=ENTRIES):
        about = f"pax_export-{VERSION}.dist-info"
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for each in sorted((PACKAGE | set(add)) - set(without)):
                archive.writestr(each, b"")
            archive.writestr(f"{about}/METADATA", metadata)
            archive.writestr(f"{about}/entry_points.txt", entries)
        return contents.wheel_faults(tmp_path / name, source, VERSION)

    return check


def test_a_wheel_that_is_good(wheel_faults):
    assert wheel_faults() == []


@pytest.mark.parametrize(
    "made, message",
    [
        ({"without": {"pax_export/py.typed"}}, f"{GOOD} lacks pax_export/py.typed"),
        ({"add": {"tests/test_a.py"}}, f"{GOOD} holds what it should not: tests/test_a.py"),
        ({"add": {"pax_export/old.so"}}, f"{GOOD} holds what it should not: pax_export/old.so"),
        ({"name": "a-0.2.0-cp311-cp311-linux_x86_64.whl"}, "not for every system"),
        ({"metadata": METADATA.replace(VERSION, "0.1.0")}, "metadata: Version is '0.1.0', not"),
        ({"metadata": METADATA.replace(">=3.11", ">=3")}, "metadata: Requires-Python is '>=3'"),
        ({"entries": ""}, "metadata: the command pax-export is missing"),
    ],
)
def test_other_wheels_are_refused(wheel_faults, made, message):
    (fault,) = wheel_faults(**made)
    assert message in fault


@pytest.fixture
def sdist_faults(source, tmp_path):
    """What is wrong with a source distribution of these files."""

    def check(add=(), without=(), top="pax_export-0.2.0"):
        known = {"PKG-INFO", *sources.FILES}
        names = (PACKAGE | known | set(add)) - set(without)
        with tarfile.open(tmp_path / "pax_export-0.2.0.tar.gz", "w:gz") as archive:
            for name in sorted(names):
                archive.addfile(tarfile.TarInfo(f"{top}/{name}"), io.BytesIO())
        return contents.sdist_faults(tmp_path / "pax_export-0.2.0.tar.gz", source, VERSION)

    return check


def test_a_source_distribution_that_is_good(sdist_faults):
    assert sdist_faults() == []


@pytest.mark.parametrize(
    "made, message",
    [
        ({"without": {"LICENSE"}}, "lacks LICENSE"),
        ({"add": {"tests/test_a.py"}}, "holds what it should not: tests/test_a.py"),
    ],
)
def test_other_source_distributions_are_refused(sdist_faults, made, message):
    (fault,) = sdist_faults(**made)
    assert message in fault


def test_a_source_distribution_has_one_folder(sdist_faults):
    assert "pax_export-0.2.0.tar.gz: not all is in pax_export-0.2.0/" in sdist_faults(top="other")


# Trial ----------------------------------------------------------------------


def about(**changed):
    file = "/environment/lib/pax_export/__init__.py"
    return {"file": file, "version": VERSION, **changed}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"file": str(ROOT / "pax_export/__init__.py")}, "was not the installed one"),
        ({"version": "0.1.0"}, "the installed version is 0.1.0, not 0.2.0"),
    ],
)
def test_the_trial_uses_the_installed_package(changed, message):
    assert trial.installed_faults(about(), Path("/environment"), VERSION) == []
    (fault,) = trial.installed_faults(about(**changed), Path("/environment"), VERSION)
    assert message in fault


def test_the_trial_leaves_the_checkout_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "import sys; print(*sys.path, sep='\\n')"
    # -S: what is installed here may lead to the checkout; in the trial nothing is.
    assert str(ROOT) not in trial.run([sys.executable, "-S", "-c", code], tmp_path).splitlines()


def test_the_example_must_learn_and_agree():
    good = "held-out accuracy: 98.33%\nthe served classes agree: True\n"
    assert trial.example_faults(good) == []
    assert "did not learn" in trial.example_faults(good.replace("98", "12"))[0]
    assert "other classes than jax" in trial.example_faults(good.replace("True", "False"))[0]
    assert len(trial.example_faults("")) == 2


# All ------------------------------------------------------------------------


def test_a_release_that_is_refused_leaves_nothing(repository, monkeypatch, capsys):
    root, git = repository
    (root / "pax_export").mkdir()
    (root / "pax_export" / "__init__.py").write_text('__version__ = "0.3.0"\n')
    (root / changelog.NAME).write_text(TEXT)
    (root / "dist").mkdir()
    (root / "dist" / "pax_export-0.2.0.tar.gz").touch()
    (root / ".gitignore").write_text("dist/\n")
    git("add", ".")
    git("commit", "--message", "all")
    monkeypatch.setattr(__main__, "ROOT", root)
    assert __main__.main([]) == 1
    assert not (root / "dist").exists()
    assert "no release, and nothing in dist/:\npax_export/__init__.py has version 0.3.0" in (
        capsys.readouterr().err
    )


def test_tox_has_the_release_and_runs_it_only_when_named():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    assert "python -m release" in config["testenv:release"]["commands"]
    assert "release" not in config["tox"]["env_list"].split()
