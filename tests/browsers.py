"""Folders for browsers in tests: one download of npm for all, and what is needed to run them."""

from __future__ import annotations

import functools
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from pax_export.errors import MissingPackageError
from pax_export.export.formats.onnx.web import browser, npm

_ALL = (npm.ONNXRUNTIME, npm.TOKENIZERS, npm.JINJA)


@functools.cache
def _downloaded() -> dict[str, Path] | str:
    """The folders of the packages, which npm downloads once; or why there are none."""
    folder = Path(tempfile.mkdtemp(prefix="pax_export_npm"))
    try:
        for each in _ALL:
            npm.copy(each, folder / each.name)
    except MissingPackageError as error:
        shutil.rmtree(folder)
        return f"npm gives no packages here: {error.got}"
    return {each.name: folder / each.name for each in _ALL}


def with_packages(monkeypatch: pytest.MonkeyPatch, needs_browser: bool = True) -> None:
    """Lets exports copy what was downloaded once; skips a test that cannot run here."""
    if needs_browser and not browser.program():
        pytest.skip("Chromium is not installed")
    found = _downloaded()
    if isinstance(found, str):
        pytest.skip(found)
    monkeypatch.setattr(npm, "copy", lambda each, folder: shutil.copytree(found[each.name], folder))


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets exports run to their end without npm: the folder has no runtime."""
    monkeypatch.setattr(npm, "found", lambda: True)
    monkeypatch.setattr(npm, "copy", lambda package, folder: folder.mkdir())


def program(path: Path, text: str) -> Path:
    """A program of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
