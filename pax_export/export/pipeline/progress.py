"""What a user sees of the phases of a save while it runs, and how long each takes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from pax_export._errors import MissingPackageError
from pax_export._optional import require

#: A save that is done within so many seconds is silent.
PATIENCE = 1.0


class Progress:
    """The phases of one save, how long each takes, and what the user sees of them on stderr.

    That is nothing at first, and a line of progress after a second: with rich installed, and a
    terminal, one that lives; otherwise one for each phase.
    """

    def __init__(self, total: int, patience: float = PATIENCE):
        self.seconds: dict[str, float] = {}
        self._total = total
        self._current = ""
        self._shown: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown is not None:
                self._shown.close()
                self._shown = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._lock:
            self._current = name
            self.seconds.setdefault(name, 0.0)
            self._tell()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def _begin(self) -> None:
        with self._lock:
            self._shown = _display(self._total)
            self._tell()

    def _tell(self) -> None:
        if self._shown is not None and self._current:
            # Phases are numbered as they first began: one may come twice, or be over.
            self._shown.show(self._current, list(self.seconds).index(self._current))


def _display(total: int) -> Any:
    if sys.stderr.isatty():
        with suppress(MissingPackageError):
            return _Bar(total)
    return _Lines(total)


class _Lines:
    def __init__(self, total: int):
        self._total = total

    def show(self, name: str, done: int) -> None:
        total = max(self._total, done + 1)
        print(f"pax_export: {name} ({done + 1}/{total})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Bar:
    def __init__(self, total: int):
        progress = require("rich.progress", "rich", "a progress bar")
        console = require("rich.console", "rich", "a progress bar").Console(stderr=True)
        self._bar = progress.Progress(console=console, transient=True)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def show(self, name: str, done: int) -> None:
        self._bar.update(self._task, description=name, completed=done)

    def close(self) -> None:
        self._bar.stop()
