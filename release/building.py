"""The source distribution, and the wheel that is built from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Builds both from a copy of the sources; returns the sdist and the wheel."""
    run("build", "--outdir", out, source)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def audit(sdist: Path, wheel: Path) -> None:
    """Lets twine check the files as PyPI does.

    Raises:
        subprocess.CalledProcessError: it found something, and has printed it.
    """
    run("twine", "check", "--strict", sdist, wheel)


def run(module: str, *arguments: str | Path) -> None:
    """Runs a tool of this environment."""
    # -P: a folder of the checkout may have the name of a tool, as build/ has.
    subprocess.run([sys.executable, "-P", "-m", module, *map(str, arguments)], check=True)
