"""One export on its way: its phases, the place that it is written to, and how it is tested."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export._files import directory as _directory
from pax_export._files import single_file
from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.report import Validated
from pax_export.export.pipeline.progress import Progress

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class ExportRun:
    """The phases of one export, the place that it is written to, and how it is tested.

    Args:
        format: what is written.
        path: of the export.
        validate: how it is tested.
        overwrite: whether it may take the place of another.
        phases: how many there are, with a test.

    Raises:
        InvalidArgumentError: ``validate`` is none of its values.
        ExportPathError: nothing can be written at the path.
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
        self._progress = Progress(phases if validate else phases - 1)
        self._writing = single_file if format.suffix else _directory
        self._writing.check(self.path, overwrite)

    def __enter__(self) -> ExportRun:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of a block, and tells the user of it if the export takes long."""
        return self._progress.phase(name)

    def place(self, needed: int = 0) -> AbstractContextManager[Path]:
        """A place that takes that of the path when the block is done: an empty folder, or a file.

        Args:
            needed: how many bytes will be written, about.
        """
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
        ways.update({"process": "process", "variables": "variables"})
        return ways[self._validate]

    @property
    def calls(self) -> bool:
        """Whether the test makes calls, which needs the whole model in memory."""
        return self._validate in (True, "process")

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase, as the report says it."""
        return {name: round(value, 4) for name, value in self._progress.seconds.items()}


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
    """What an argument says of each signature.

    Args:
        name: of the argument.
        value: of the argument: for the only signature, or a dict over some keys.
        keys: of all signatures.
        several: whether the user named them.
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
