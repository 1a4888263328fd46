"""The sources: what a distribution is built from, their version, and whether git has them."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

#: All that a build reads.
FILES = (
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
)
PACKAGE = "pax_export"

_not_sources = shutil.ignore_patterns("__pycache__")


def copy(root: Path, to: Path) -> Path:
    """Copies what a build reads, and nothing that earlier builds have left; returns `to`."""
    to.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(root / name, to)
    shutil.copytree(root / PACKAGE, to / PACKAGE, ignore=_not_sources)
    return to


def version(root: Path) -> str:
    """The version that `pax_export/__init__.py` has, without importing it."""
    tree = ast.parse((root / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{PACKAGE}/__init__.py has no __version__")


def faults(root: Path, version: str) -> list[str]:
    """What git says against a release: changes that it does not have, another commit's tag."""
    found = []
    if changed := _git(root, "status", "--porcelain").splitlines():
        found.append(f"git does not have these changes: commit or remove them\n{_few(changed)}")
    tagged = _git(root, "tag", "--list", f"v{version}")
    if tagged and _git(root, "rev-list", "-1", tagged) != _git(root, "rev-parse", "HEAD"):
        found.append(
            f"the tag {tagged} is on another commit: what is new since then needs a new version"
        )
    return found


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip()


def _few(lines: list[str], most: int = 10) -> str:
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([*(f"  {line}" for line in lines[:most]), *more])
