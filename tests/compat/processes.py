"""Processes of their own: what is installed as `pax` stays installed until the end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


# The numbers hardly depend on how well XLA compiles, and it takes half the time.
_VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


def python(*arguments, check=True, cwd=None):
    """Runs Python on the sources of this checkout."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, **_VARIABLES},
        capture_output=True, text=True, timeout=900, cwd=cwd,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


def code(text, **options):
    """Runs a few lines; returns what they print, as lines."""
    return python("-W", "error", "-c", text, **options).stdout.splitlines()


def pax_export_run(*arguments, **options):
    """Runs ``pax-export run``."""
    return python("-m", "pax_export.cli", "run", *arguments, **options)
