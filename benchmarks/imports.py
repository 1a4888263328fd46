"""Importing: what ``import pax_export`` adds to ``import jax``.

Installed packages hold bytecode, and a checkout may hold none: compiling the sources in every
process takes longer than all else, so ours are compiled first.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
from collections.abc import Callable, Iterator

import pax_export
from benchmarks.compare import compare, table


def tables() -> Iterator[str]:
    """Whole processes, since a module is imported once."""
    compileall.compile_dir(pax_export.__path__[0], quiet=2)
    training = "jax, pax_export.nn, pax_export.optim"
    peers = {"import jax": "jax", "pax_export": "jax, pax_export", "its nn and optim too": training}
    peers |= {"equinox": "jax, equinox", "flax nnx": "jax, flax.nnx", "dm-haiku": "jax, haiku"}
    rows = compare({name: _process(modules) for name, modules in peers.items()}, rounds=9)
    yield table("a process that imports", rows, "60 ms more than import jax")


def _process(modules: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
