"""Progress display and timing of phases."""

from __future__ import annotations

import html
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from pax_export._errors import MissingPackageError
from pax_export._optional import require

#: A save that takes fewer seconds than this is silent.
PATIENCE = 1.0


class Progress:
    """The phases of one save with their durations, shown on stderr after a second.

    A notebook shows a progress bar, a terminal with rich a live line, others a line per phase.
    """

    def __init__(self, total: int, patience: float = PATIENCE):
        self.seconds: dict[str, float] = {}
        self._total = total
        self._current = ""
        self._shown: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._begin_display)
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
            self._show_phase()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def _begin_display(self) -> None:
        with self._lock:
            self._shown = _choose_display(self._total)
            self._show_phase()

    def _show_phase(self) -> None:
        if self._shown is not None and self._current:
            # Phases are numbered as they first began: one may come twice, or be over.
            self._shown.show(self._current, list(self.seconds).index(self._current))


def _choose_display(total: int) -> Any:
    if _in_notebook():
        return _NotebookOutput(total)
    if sys.stderr.isatty():
        with suppress(MissingPackageError):
            return _Bar(total)
    return _Lines(total)


def _in_notebook() -> bool:
    """Returns whether this runs in a notebook kernel; IPython is never imported."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(ask(), "kernel", None) is not None


class _Lines:
    def __init__(self, total: int):
        self._total = total

    def show(self, name: str, done: int) -> None:
        total = max(self._total, done + 1)
        print(f"pax_export: {name} ({done + 1}/{total})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _NotebookOutput:
    """An updatable output of a notebook's cell, by IPython alone; text where HTML is not shown."""

    def __init__(self, total: int):
        self._total = total
        self._handle: Any = None

    def show(self, name: str, done: int) -> None:
        total = max(self._total, done + 1)
        line = f"pax_export: {name} ({done + 1}/{total})"
        bar = f'<progress value="{done}" max="{total}"></progress> '
        self._put_content(line, f"<div>{bar}{html.escape(line)}</div>")

    def close(self) -> None:
        """An empty output stays, also in the file of the notebook."""
        self._put_content("", "")

    def _put_content(self, line: str, text: str) -> None:
        content = {"text/plain": line, "text/html": text}
        if self._handle is not None:
            self._handle.update(content, raw=True)
        elif line:
            display = importlib.import_module("IPython.display").display
            self._handle = display(content, raw=True, display_id=True)


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
