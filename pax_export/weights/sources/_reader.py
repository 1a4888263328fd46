"""The interface of a weights reader: metadata when opened, arrays when read."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self

from pax_export.weights._binary_file import BinaryFile
from pax_export.weights.sources._source import Source, refuse_damaged
from pax_export.weights.sources._zip_archive import ZipArchive


class InputFile(BinaryFile):
    """An untrusted file that is open while its source is; `archive` is its zip archive, or None."""

    def __init__(
        self,
        path: Path,
        where: str | None = None,
        keep_quantised: bool = False,
        resources: ExitStack | None = None,
    ):
        super().__init__(path, where)
        self.keep_quantised = keep_quantised
        self._resources = ExitStack() if resources is None else resources
        self._resources.callback(self.close)

    def open_other(self, path: Path, where: str | None = None) -> Self:
        """Opens another file, which is closed together with this one."""
        return type(self)(path, where, self.keep_quantised, self._resources)

    @cached_property
    def archive(self) -> ZipArchive | None:
        """The members of a zip archive, or None."""
        if self.begin(2) != b"PK":
            return None
        with refuse_damaged(self.where, "zip archive"):
            return ZipArchive(self)


class Reader(Protocol):
    """A module that reads one format."""

    @property
    def KIND(self) -> str:
        """The name of this file format in errors."""
        ...

    def matches(self, file: InputFile) -> bool:
        """Whether the content of the file, not its name, has this format."""
        ...

    def read(self, file: InputFile) -> Source:
        """The names, shapes and dtypes of the arrays; any exception becomes a WeightsFileError."""
        ...
