"""FormatExporter and Contents: how one format lowers, writes, tests and reports a model.

Both are frozen: a part of the model is another `Contents`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pax_export._foundations.errors import ValidationError
from pax_export._foundations.types import PyTree
from pax_export.export.artifact.formats import Format, import_function
from pax_export.export.artifact.options import Request
from pax_export.export.artifact.report import Report, VariableInfo, write_report
from pax_export.export.lowering.variables import Store
from pax_export.export.pipeline.phases import ExportRun, scratch_path
from pax_export.export.portable import PassOptions, PortableProgram, Weight, optimized
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.programs import Program, refuse_changes, trace_all
from pax_export.export.validation.cases import ProgramCases, cases_in_turns
from pax_export.export.validation.probes import Budget
from pax_export.export.validation.serve import Run
from pax_export.export.validation.validate import Case, validate


class FormatExporter(ABC):
    """The phases of an export that depend on the format.

    Attributes:
        format: its row in the table of formats.
        loads: the package to load after lowering, as shown to users; "" for none.
        runtime: the title of the format's runtime, if only validation requires it.
        tests_reported: whether validation needs the report next to the export.
        one_by_one: whether the format's `run` makes one call at a time.
        updates_state: whether a call can assign state to variables, `state="update"`.
    """

    format: ClassVar[Format]
    loads: ClassVar[str] = ""
    runtime: ClassVar[str] = ""
    tests_reported: ClassVar[bool] = False
    one_by_one: ClassVar[bool] = False
    updates_state: ClassVar[bool] = False

    @property
    def factor(self) -> float:
        """The factor of the tolerance for results of this format."""
        return 1.0

    def find(self, request: Request) -> None:  # noqa: B027  most formats load nothing
        """Finds the packages that `load` loads, before any work is done."""

    def other_platforms(self, request: Request) -> Sequence[str]:
        """The platforms of the export, if this process can run none of them."""
        return ()

    def load(self, request: Request) -> None:  # noqa: B027
        """Loads the packages of `loads` or `runtime`: slow, so only after the model is accepted."""

    def trace(self, request: Request) -> tuple[Exportable, Sequence[Program]]:
        """Reads the model, and traces each of its methods."""
        model, train_inputs = self.read_model(request)
        programs = trace_all(
            model,
            request.inputs,
            kwargs=request.kwargs,
            constraints=request.constraints,
            several=request.methods is not None,
            train_inputs=train_inputs,
        )
        return model, programs

    def read_model(self, request: Request) -> tuple[Exportable, PyTree]:
        """The model with all methods, and the inputs of the one that trains, if it has one."""
        return make_exportable(request.model, request.methods, request.outputs), None

    @abstractmethod
    def lower(self, model: Exportable, programs: Sequence[Program], request: Request) -> Contents:
        """Lowers the programs to the contents of the export."""

    def make(self, run: ExportRun, request: Request) -> Contents:
        """Lowers the user's model to the contents of the export."""
        with run.phase("trace"):
            model, programs = self.trace(request)
            refuse_changes(model, programs, request.state, updates=self.updates_state)
        with run.phase("lower"):
            contents = self.lower(model, programs, request)
        if self.loads:
            with run.loading(self.loads, self.loads):
                self.load(request)
        return contents

    def partial(self) -> FormatExporter | None:
        """The exporter of parts of a model for `bisect`, without gradients; or None."""
        return self

    def run_here(self) -> Run:
        """Returns the function that makes the calls of a validation in this process."""
        return import_function(self.format.run)


@dataclass(frozen=True)
class Contents(ABC):
    """A lowered model in one format.

    Attributes:
        name: the name of the model.
        variables: the stored arrays, for the report.
    """

    name: str
    variables: Sequence[VariableInfo]

    @abstractmethod
    def write(self, path: Path) -> Any:
        """Writes it, into a folder or to a file; returns facts for the report."""

    @abstractmethod
    def cases(self, budget: Budget) -> Iterable[Case]:
        """The calls of a test, as many as the budget has time for."""

    def stored(self) -> Mapping[str, Any]:
        """Returns the stored arrays by name, or none; deferred ones are not read yet."""
        return {}

    def test(self, exporter: FormatExporter, path: Path, run: ExportRun) -> dict[str, float]:
        """Validates the export; returns the largest error of each output."""
        here = exporter.run_here() if exporter.one_by_one else None
        cases = self.cases(run.budget)
        return validate(exporter.format, path, cases, run.separate, exporter.factor, here)

    def test_apart(self, exporter: FormatExporter, run: ExportRun) -> dict[str, float]:
        """Validates it from a scratch file."""
        with scratch_path(exporter.format) as path:
            self.write(path)
            return self.test(exporter, path, run)

    def part(self, exporter: FormatExporter) -> FormatExporter | None:
        """The exporter of parts of this model."""
        return exporter.partial()

    def instead(self, error: ValidationError) -> Contents | None:
        """Returns the model in another form, to write instead of one that failed so."""
        return None

    @abstractmethod
    def report_fields(self, path: Path, written: Any, run: ExportRun) -> dict[str, Any]:
        """Returns the format's own fields of the report; `written` is the result of `write`."""

    def write_report(self, report: Report, path: Path, written: Any) -> None:
        """Writes the report next to the export."""
        write_report(report, path)


@dataclass(frozen=True)
class ProgramContents(Contents):
    """Traced programs and their weights, for formats that compute outputs alone."""

    programs: Sequence[Program]  # one per signature
    store: Store  # leaves and constants
    examples: Mapping[str, Sequence[Any]]  # inputs of test calls, by signature

    def stored(self) -> Mapping[str, Any]:
        return {each.name: each.value for each in self.store.variables}

    def cases(self, budget: Budget) -> Iterator[Case]:
        leaves = [self.store.variables[number].value for number in self.store.of_leaf]
        parts = (
            ProgramCases(each, leaves, self.examples.get(each.key, ())) for each in self.programs
        )
        return cases_in_turns(parts, budget)


def portable_program(
    program: Program, store: Store, options: PassOptions | None, updates: bool = False
) -> PortableProgram:
    """Returns a program after the passes of `portable`, or as it was traced for None.

    Its weights have the names in the store; with `updates`, changed leaves are results, too.
    """
    traced = program.traced
    count = len(traced.structs) - len(program.inputs.flat)
    variables = [store.variables[number] for number in store.of_leaf[:count]]
    leaves = [Weight(each.name, each.value) for each in variables]
    if options is None:
        return PortableProgram(traced.program, tuple(leaves))
    results = None if updates else len(program.output_names)
    names = {id(v): store.variables[store.of_constant(v)].name for v in traced.constants}
    return optimized(traced.program, leaves, names, options, results)


def store_of(model: Exportable, programs: Sequence[Program]) -> Store:
    """The leaves of a model and the constants of its programs, to be stored."""
    store = Store(model.leaves, (), trainable=False)
    for each in programs:
        for value in each.traced.constants:
            store.of_constant(value)
    return store
