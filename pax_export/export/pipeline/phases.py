"""The state of one export: phases, paths, validation, and its progress as shown."""

from __future__ import annotations

import html
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import InvalidArgumentTypeError, MissingPackageError
from pax_export._foundations.files import atomic, own_files
from pax_export._foundations.files.own_files import (
    card_of_file,
    card_of_folder,
    check_card,
    remove_card,
)
from pax_export._foundations.optional import require
from pax_export.export.artifact.card import write_card
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.own_exports import export_of_ours
from pax_export.export.artifact.report import Report, Validated
from pax_export.export.validation.probes import SPARE, Budget

#: A save that takes fewer seconds than this, and imports no runtime, is silent.
PATIENCE = 1.0
#: The values of `validate` with which an export is called.
CALLS = (True, "full", "process")


class Progress:
    """The phases of one save with their durations, shown on stderr after a second or an import.

    A notebook shows a progress bar, a terminal with rich a live line, others a line per phase.
    An export within another one shows nothing.
    """

    _saving: ClassVar[set[int]] = set()  # threads

    def __init__(self, total: int, patience: float = PATIENCE):
        self.seconds: dict[str, float] = {}
        self._total = total
        self._current = ""
        self._shown: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._begin_display)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._is_inner = threading.get_ident() in self._saving
        self._saving.add(threading.get_ident())
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown is not None:
                self._shown.close()
                self._shown = None
        if not self._is_inner:
            self._saving.discard(threading.get_ident())

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        with self._lock:
            self._current = name
            self.seconds.setdefault(name, 0.0)
            self._show_phase()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def loading(self, title: str, package: str) -> Generator[None]:
        """The phase of importing a package, shown before a first import.

        The import of a large library keeps the thread of the timer from running.
        """
        with self.phase(f"load {title}"):
            if package not in sys.modules:
                self._begin_display()
            yield

    def _begin_display(self) -> None:
        with self._lock:
            if self._shown is None and not self._is_inner:
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
        self._bar.update(self._task, description=name, completed=done, refresh=True)

    def close(self) -> None:
        self._bar.stop()


@contextmanager
def scratch_path(format: Format) -> Generator[Path]:
    """A place that a part of a model is written to, for a look at it."""
    with atomic.scratch() as folder:
        path = folder / f"part{format.suffix}"
        if not format.suffix:
            path.mkdir()
        yield path


def check_validate(validate: object, format: Format) -> None:
    """Refuses what is no value of `validate=`."""
    more = ("variables",) if format.has_variables else ()
    checked_choice(validate, (True, False, "full", "process", *more), "validate")


class ExportRun(Progress):
    """The phases of one export: writing, validation, and the move to its path.

    The validation may be turned off. `overwrite` replaces only exports that `ours` recognizes.
    """

    def __init__(
        self,
        format: Format,
        path: str | os.PathLike[str],
        *,
        validate: Any,
        overwrite: bool,
        phases: int,
        ours: own_files.Recognize = export_of_ours,
        card: Any = False,
    ):
        checked_choice(overwrite, (True, False), "overwrite")
        self.path = atomic.absolute(path)
        if format.plain_path:
            atomic.check_plain(self.path)
        self._ours = ours if overwrite else None
        self._validate = validate
        #: The time limit of the validation, and what it left out.
        self.budget = Budget()
        super().__init__(phases if validate else phases - 1)
        self._writing = atomic.FILE if format.suffix else atomic.DIRECTORY
        self._writing.check(self.path, self._ours)
        self._card, self._drawing = _read_card(card)
        if self._card and format.suffix:
            check_card(self.path)

    def place(self) -> AbstractContextManager[Path]:
        """A temporary place that replaces the path when the block ends."""
        return self._writing.replace(self.path, self._ours)

    def write_card(self, report: Report, path: Path) -> None:
        """Writes the HTML card, if wanted, into a folder or next to a file."""
        if self._card:
            of = card_of_folder if path.is_dir() else card_of_file
            write_card(report, path, of(path), self._drawing)

    def clear(self) -> None:
        """Removes the card of the file that was replaced, if the new one has none."""
        if not self._card and self._writing is atomic.FILE:
            remove_card(self.path)

    def tested(self, test: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Validates the export, if wanted; returns the largest error of each output."""
        if not self._validate:
            return {}
        before = sum(self.seconds.values()) + SPARE
        seconds = before if self._validate is True else None
        self.budget = Budget(seconds, probes="all" if self._validate == "full" else "few")
        with self.phase("validate"):
            return test()

    @property
    def separate(self) -> bool:
        return self._validate == "process"

    @property
    def validated(self) -> Validated:
        """How the export was validated, for the report."""
        ways: dict[Any, Validated] = {True: "here", "full": "here", False: None}
        return ways.get(self._validate, self._validate)

    @property
    def calls(self) -> bool:
        """Whether the test makes calls, which needs the whole model in memory."""
        return self._validate in CALLS

    @property
    def wall_time(self) -> dict[str, float]:
        """Seconds by phase, as in the report."""
        return {name: round(value, 4) for name, value in self.seconds.items()}


def _read_card(card: Any) -> tuple[bool, str]:
    """Returns whether to write a card, and the drawing for it."""
    if isinstance(card, bool):
        return card, ""
    if hasattr(card, "to_svg"):
        return True, card.to_svg()
    raise InvalidArgumentTypeError(
        "card must be True, False, or the drawing on the card.",
        got=f"card={card!r:.80}",
        write="card=False, or card=pax.inspection.draw(net, inputs)",
    )
