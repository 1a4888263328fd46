"""One export on its way: its phases, the place that it is written to, and how it is tested."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from pax_export._errors import InvalidArgumentError, MissingPackageError
from pax_export._files import directory as _directory
from pax_export._files import single_file
from pax_export._optional import require
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.report import Validated

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
#: A save that is done within so many seconds is silent.
PATIENCE = 1.0


class Progress:
    """The phases of one save, how long each takes, and what the user sees of them."""

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
        """Counts the time of its block under a name."""
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
    """One line for each phase."""

    def __init__(self, total: int):
        self._total = total

    def show(self, name: str, done: int) -> None:
        print(f"pax_export: {name} ({done + 1}/{self._total})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Bar:
    """A bar that stays in its line, by rich."""

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


class ExportRun(Progress):
    """The phases of one export, the place that it is written to, and how it is tested.

    It has one phase less without a test.
    """

    def __init__(
        self,
        format: Format,
        path: str | os.PathLike[str],
        *,
        validate: Any,
        overwrite: bool,
        phases: int,
    ):
        ways = (True, False, "process", *(("variables",) if format.has_variables else ()))
        check_choice("validate", validate, ways)
        self.path = _directory.place(path)
        self._overwrite = overwrite
        self._validate = validate
        super().__init__(phases if validate else phases - 1)
        self._writing = single_file if format.suffix else _directory
        self._writing.check(self.path, overwrite)

    def place(self, needed: int = 0) -> AbstractContextManager[Path]:
        """A place for about so many bytes, which takes that of the path when the block is done."""
        return self._writing.replaced(self.path, self._overwrite, needed)

    def tested(self, test: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Tests what was written, if the user wants it; gives the largest error of each output."""
        if not self._validate:
            return {}
        with self.phase("validate"):
            return test()

    @property
    def separate(self) -> bool:
        """Whether the test is made in a process of its own."""
        return self._validate == "process"

    @property
    def validated(self) -> Validated:
        """How the export was tested, as the report says it."""
        ways: dict[Any, Validated] = {True: "here", False: None}
        return ways.get(self._validate, self._validate)

    @property
    def calls(self) -> bool:
        """Whether the test makes calls, which needs the whole model in memory."""
        return self._validate in (True, "process")

    @property
    def wall_time(self) -> dict[str, float]:
        """Seconds by phase, as the report says them."""
        return {name: round(value, 4) for name, value in self.seconds.items()}


def checked_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    """The platforms as a tuple."""
    platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [name for name in platforms if name not in PLATFORMS]
    if unknown or not platforms:
        raise InvalidArgumentError(
            "The platforms to lower for are cpu, cuda, rocm and tpu.",
            got=f"platforms={platforms}",
            write='platforms=("cpu", "cuda")',
        )
    return platforms


def check_choice(name: str, value: Any, choices: tuple) -> None:
    """Refuses a value that is none of a few."""
    if not any(value is choice or (value == choice and value != 1) for choice in choices):
        raise InvalidArgumentError(
            f"{name} has a value that means nothing.",
            got=f"{name}={value!r}",
            write=" or ".join(f"{name}={choice!r}" for choice in choices),
        )


def by_signature(name: str, value: Any, keys: Sequence[str], several: bool) -> dict[str, Any]:
    """What an argument says of each signature: given for the only one, or as a dict over some keys.

    With `several`, the user has named the signatures, and it must be a dict.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping) and set(value) <= set(keys) and len(keys) > 1:
        return dict(value)
    if not several:
        return {keys[0]: value}
    raise InvalidArgumentError(
        "With several signatures, this is given for some or all of them.",
        where=name,
        got=sorted(value) if isinstance(value, Mapping) else type(value).__name__,
        write=f"{name}={{{keys[0]!r}: ...}}",
    )
