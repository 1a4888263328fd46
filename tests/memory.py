"""How much memory this process holds, and what a block needs beyond it; Linux tells in /proc."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import python

on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux tells of peaks"
)


def mebibytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


@contextlib.contextmanager
def peak(found: dict[str, float], name: str, watched: bool = False) -> Iterator[None]:
    """Adds the peak of a block in MiB beyond what was held before.

    Args:
        found: what the peak is added to.
        name: of the peak in it.
        watched: without pages of files, by looking again and again.
    """
    if not watched:
        before = mebibytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        yield
        found[name] = mebibytes("VmHWM") - before
        return
    before, most, done = mebibytes("RssAnon"), 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, mebibytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        found[name] = max(most - before, 0.0)


def measured(module: str, *arguments: object, **options: Any) -> Any:
    """What a module that measures prints as its last line, in a process of its own."""
    done = python("-m", module, *arguments, **options)
    return json.loads(done.stdout.splitlines()[-1])
