"""Importing: what ``import pax_export`` adds to ``import jax``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.compare import compare, table


def tables() -> Iterator[str]:
    """Whole processes, since a module is imported once."""
    peers = {"import jax": "jax", "pax_export": "jax, pax_export", "equinox": "jax, equinox"}
    peers |= {"flax nnx": "jax, flax.nnx", "dm-haiku": "jax, haiku"}
    rows = compare({name: _process(modules) for name, modules in peers.items()}, rounds=9)
    yield table("a process that imports", rows, "60 ms more than import jax")


def _process(modules: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
