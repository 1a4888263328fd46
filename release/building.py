"""The source distribution, and the wheel that is built from it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

#: The oldest Linux that the wheel is for; jaxlib, which all need, is for no older one.
MANYLINUX = f"manylinux_2_17_{platform.machine()}"


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Builds both from a copy of the sources; returns the sdist and the wheel."""
    run("build", "--outdir", out, source, env=os.environ | _linker())
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def for_pypi(wheel: Path, out: Path) -> Path:
    """The wheel as PyPI takes it: on Linux it says for which."""
    if sys.platform != "linux":
        return wheel
    # The platform is named because auditwheel cannot tell glibc from other libraries by a
    # file that calls neither.
    run("auditwheel", "repair", "--plat", MANYLINUX, "--only-plat", "--strip", "-w", out, wheel)
    (repaired,) = out.glob("*.whl")
    return repaired


def audit(sdist: Path, wheel: Path) -> None:
    """Lets those check the files who know PyPI and Python's stable interface.

    Raises:
        subprocess.CalledProcessError: one of them found something, and has printed it.
    """
    run("twine", "check", "--strict", sdist, wheel)
    run("abi3audit", "--strict", "--summary", wheel)


def run(module: str, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
    """Runs a tool of this environment."""
    # -P: a folder of the checkout may have the name of a tool, as build/ has.
    subprocess.run([sys.executable, "-P", "-m", module, *map(str, arguments)], check=True, env=env)


def _linker() -> dict[str, str]:
    """Python links as it was linked itself, and some write their own folder into the file."""
    return {"LDSHARED": "cc -shared"} if sys.platform == "linux" else {}
