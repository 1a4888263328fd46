"""What every format does alike: check, load, trace, lower, write, test, report, and take the place.

A format says its own part in a `Writer`; `run_export` calls it phase by phase.  Nothing stands
at the path before the end, and nothing is left where a phase fails.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pax_export.export.artifact.formats import Format
from pax_export.export.artifact.report import Report, VariableInfo, write_report
from pax_export.export.pipeline.export_run import ExportRun
from pax_export.export.tracing.exportable import Exportable, exportable
from pax_export.export.tracing.programs import Program, trace_all
from pax_export.export.validation.compare import Case
from pax_export.export.validation.validate import validate


@dataclass(frozen=True)
class Request:
    """What a user says of an export to any format; see `to_saved_model` for each."""

    model: Any
    path: str | os.PathLike[str]
    inputs: Any
    kwargs: Mapping[str, Any] | None = None
    methods: Mapping[str, Any] | None = None
    constraints: Sequence[str] = ()
    validate: Any = True
    overwrite: bool = False


class Writer(ABC):
    """What one format does in the phases of an export; made for one export.

    Attributes:
        format: its row in the table of formats.
        loads: the package that is loaded first, as the user is told of it; empty for none.
        factor: how much more than rounding its results may differ from jax's.
        tests_reported: whether a test needs the report beside what was written.
        name: of the model.
        variables: the stored arrays, for the report.
    """

    format: ClassVar[Format]
    loads: ClassVar[str] = ""
    factor: float = 1.0
    tests_reported: ClassVar[bool] = False
    name: str
    variables: Sequence[VariableInfo]

    def load(self, request: Request) -> None:  # noqa: B027  most formats load nothing
        """Loads packages, before any work is done."""

    def trace(self, request: Request) -> tuple[Exportable, Sequence[Program]]:
        """Reads the model, and traces each of its methods."""
        model = exportable(request.model, request.methods)
        several = request.methods is not None
        return model, trace_all(model, request.inputs, request.kwargs, request.constraints, several)

    @abstractmethod
    def lower(self, model: Exportable, programs: Sequence[Program]) -> None:
        """Makes what is written; sets `variables`."""

    def make(self, run: ExportRun, request: Request) -> None:
        """Makes what is written of the model."""
        with run.phase("trace"):
            model, programs = self.trace(request)
        self.name = model.name
        with run.phase("lower"):
            self.lower(model, programs)

    def needed(self) -> int:
        """About so many bytes will be written."""
        return sum(each.bytes for each in self.variables)

    @abstractmethod
    def write(self, place: Path) -> None:
        """Writes it: into a folder, or to a file."""

    @abstractmethod
    def cases(self) -> list[Case]:
        """The calls of a test."""

    def test(self, place: Path, run: ExportRun) -> dict[str, float]:
        """Tests what was written; gives the largest error of each output."""
        return validate(self.format, place, self.cases(), run.separate, self.factor)

    @abstractmethod
    def facts(self, place: Path) -> dict[str, Any]:
        """What of the report only this format knows."""

    def attach(self, report: Report, place: Path) -> None:
        """Writes the report where it will be found."""
        write_report(report, place)


def run_export(writer: Writer, request: Request) -> Report:
    """Makes one export, whole or not at all.

    Raises:
        PaxError: of a class for each mistake.
    """
    run = ExportRun(
        writer.format,
        request.path,
        validate=request.validate,
        overwrite=request.overwrite,
        phases=5 if writer.loads else 4,
    )
    with run:
        if writer.loads:
            with run.phase(f"load {writer.loads}"):
                writer.load(request)
        writer.make(run, request)
        with run.place(writer.needed()) as place:
            with run.phase("write"):
                writer.write(place)
            if writer.tests_reported:
                writer.attach(_report(writer, place, run, {}), place)
            errors = run.tested(lambda: writer.test(place, run))
            report = _report(writer, place, run, errors)
            writer.attach(report, place)
    return report


def _report(writer: Writer, place: Path, run: ExportRun, errors: dict[str, float]) -> Report:
    facts = {"oldest_tensorflow": "", "stablehlo": "", "calling_convention": 0}
    return Report(
        model=writer.name,
        variables=tuple(writer.variables),
        variable_bytes=sum(each.bytes for each in writer.variables),
        validated=run.validated,
        largest_error=errors,
        seconds=run.wall_time,
        target=writer.format.name,
        **{**facts, **writer.facts(place)},
    )
