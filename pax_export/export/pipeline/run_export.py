"""What every format does alike: check, load, trace, lower, write, test, report, and take the place.

A format says its own part in a `Writer`; `run_export` calls it phase by phase.  Nothing stands
at the path before the end, and nothing is left where a phase fails.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pax_export._errors import (
    GradientMismatchError,
    NotValidatedWarning,
    PaxError,
    ValidationError,
    a_few,
)
from pax_export._optional import find, install, is_installed
from pax_export.core import traced_anew
from pax_export.export.artifact.dtypes import is_inexact
from pax_export.export.artifact.formats import Format, imported
from pax_export.export.artifact.report import Report, VariableInfo, write_report
from pax_export.export.pipeline.arguments import check_choice
from pax_export.export.pipeline.export_run import ExportRun
from pax_export.export.pipeline.parting import Parting, named, parting
from pax_export.export.pipeline.refusal import name_modules, scratch_place, with_paths
from pax_export.export.pipeline.sweep import Cause, causes
from pax_export.export.tracing.exportable import Exportable, exportable
from pax_export.export.tracing.programs import Program, refuse_changes, trace_all
from pax_export.export.validation.budget import Budget
from pax_export.export.validation.probes import Difference
from pax_export.export.validation.serve import Arrays, Run
from pax_export.export.validation.validate import Case, call, validate

#: So many weights are named.
_FEW = 8


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
    sign: Any = None  # the path of a private key
    card: Any = True  # whether there is one, or the drawing in it
    state: str = "frozen"  # what becomes of the changes of a call
    outputs: str = "float32"  # the dtype of half-precision outputs of a policy


class Runtime(NamedTuple):
    """What runs an export: a package, the extra that brings it, and its name in sentences."""

    package: str
    extra: str
    title: str


class Writer(ABC):
    """What one format does in the phases of an export; made for one export.

    Attributes:
        format: its row in the table of formats.
        loads: the package that is loaded once the model has been lowered, as the user is told
            of it; empty for none.
        runtime: what a test in this process needs, if writing does not need it as well.
        factor: how much more than rounding its results may differ from jax's.
        tests_reported: whether a test needs the report beside what was written.
        one_by_one: whether the format's `run` asks for one call after the other.
        budget: what a test may cost, once it has begun.
        name: of the model.
        variables: the stored arrays, for the report.
    """

    format: ClassVar[Format]
    loads: ClassVar[str] = ""
    runtime: ClassVar[Runtime | None] = None
    factor: float = 1.0
    tests_reported: ClassVar[bool] = False
    one_by_one: ClassVar[bool] = False
    budget: Budget = Budget()
    name: str
    variables: Sequence[VariableInfo]

    def find(self, request: Request) -> None:  # noqa: B027  most formats load nothing
        """Finds the packages that `load` loads, before any work is done."""

    def load(self, request: Request) -> None:  # noqa: B027
        """Loads the packages that `loads` names, or else the `runtime`.

        Either takes longer than to find out that a model is to be refused.
        """

    def trace(self, request: Request) -> tuple[Exportable, Sequence[Program]]:
        """Reads the model, and traces each of its methods."""
        model = exportable(request.model, request.methods, request.outputs)
        several = request.methods is not None
        return model, trace_all(model, request.inputs, request.kwargs, request.constraints, several)

    @abstractmethod
    def lower(self, model: Exportable, programs: Sequence[Program]) -> None:
        """Makes what is written; sets `variables`."""

    def make(self, run: ExportRun, request: Request) -> None:
        """Makes what is written of the model."""
        with run.phase("trace"):
            model, programs = self.trace(request)
            refuse_changes(model, programs, request.state)
        self.name = model.name
        with run.phase("lower"):
            self.lower(model, programs)
        if self.loads:
            with run.phase(f"load {self.loads}"):
                self.load(request)

    def needed(self) -> int:
        """About so many bytes will be written."""
        return sum(each.bytes for each in self.variables)

    @abstractmethod
    def write(self, place: Path) -> None:
        """Writes it: into a folder, or to a file."""

    @abstractmethod
    def cases(self) -> Iterable[Case]:
        """The calls of a test, as many as the budget has time for."""

    def stored(self) -> Mapping[str, Any]:
        """The stored arrays by name, where they are in memory; asked for when a test has failed."""
        return {}

    def test(self, place: Path, run: ExportRun) -> dict[str, float]:
        """Tests what was written; gives the largest error of each output."""
        here = self.run_here() if self.one_by_one else None
        return validate(self.format, place, self.cases(), run.separate, self.factor, here)

    def run_here(self) -> Run:
        """What makes the calls of a test in this process."""
        return imported(self.format.run)

    def for_part(self) -> Writer | None:
        """One alike that writes a part of the model, to find where an export goes wrong.

        None where that has no use.  What such a part holds is a program alone: no gradients,
        no new state, nothing around it.
        """
        return copy.copy(self)

    def gives_up(self, error: ValidationError) -> bool:
        """Whether a part that nobody asked for is left out now, because its test failed so."""
        return False

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
    check_choice("outputs", request.outputs, ("float32", "model"))
    missing = _missing_runtime(writer, request)
    validate = False if missing else request.validate
    loads = writer.loads or (writer.runtime and validate in (True, "full"))
    run = ExportRun(
        writer.format,
        request.path,
        validate=validate,
        overwrite=request.overwrite,
        phases=5 if loads else 4,
        sign=request.sign,
        card=request.card,
    )
    run.budget.left_out += missing
    with run:
        writer.find(request)
        try:
            return _exported(writer, run, request)
        except PaxError as error:
            _name_modules(error, writer, request)
            raise


def _missing_runtime(writer: Writer, request: Request) -> list[str]:
    """Why nothing is tested, if what runs the export is not installed; it is said in a warning.

    A test that was asked for, unlike the one that is made anyway, is an error then.
    """
    runtime = writer.runtime
    if runtime is None or request.validate not in (True, "full", "process"):
        return []
    if request.validate is not True:
        find(*runtime[:2], f"{writer.format.exporter}(..., validate={request.validate!r})")
    if is_installed(runtime.package):
        return []
    reason = f"{runtime.title} is not installed"
    warning = NotValidatedWarning(
        f"The export is not validated: {reason}.",
        where=str(request.path),
        write=f"{install(runtime.extra)}, or validate=False",
    )
    warnings.warn(warning, stacklevel=4)
    return [f"not validated: {reason}"]


def _exported(writer: Writer, run: ExportRun, request: Request) -> Report:
    writer.make(run, request)
    with run.place(writer.needed()) as place:
        with run.phase("write"):
            writer.write(place)
        if writer.tests_reported:
            writer.attach(_report(writer, place, run, {}), place)
        errors = _tested(writer, place, run, request)
        report = _report(writer, place, run, errors)
        run.write_card(report, place)
        writer.attach(report, place)
        run.sign(place)
    run.clear()
    return report


def _name_modules(error: PaxError, writer: Writer, request: Request) -> None:
    """Adds to a refusal in which modules the operations stand that it is about."""

    def again(model: Any) -> None:
        copied = copy.copy(writer)
        copied.lower(*copied.trace(dataclasses.replace(request, model=model)))
        with scratch_place(writer.format) as place:
            copied.write(place)

    name_modules(error, request.model, again, lambda: writer.trace(request)[1])


def _tested(writer: Writer, place: Path, run: ExportRun, request: Request) -> dict[str, float]:
    """Tests what was written, and once more without what failed and nobody asked for."""
    if writer.runtime and run.calls and not run.separate:
        with run.phase(f"load {writer.runtime.title}"):
            writer.load(request)
    try:
        errors = run.tested(lambda: _test(writer, place, run))
        _judge(writer, run, request)
        return errors
    except ValidationError as error:
        if not writer.gives_up(error):
            _name(error, writer, run, request)
            raise
    with run.phase("write"):
        for each in place.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        writer.write(place)
    try:
        errors = run.tested(lambda: _test(writer, place, run))
        _judge(writer, run, request)
        return errors
    except ValidationError as error:
        _name(error, writer, run, request)
        raise


def _judge(writer: Writer, run: ExportRun, request: Request) -> None:
    """Notes what differs for inputs far from the usual ones, by the operation that does.

    Where an operation is wrong for numbers that are still usual, the export is refused.
    """
    differences: list[Difference] = run.budget.differences
    if not differences:
        return
    found: list[Cause | None] = [None] * len(differences)
    part = writer.for_part()
    if part is not None and not not_finite(writer.stored()):
        # It only says more: whatever fails here is no reason to say less.
        with run.phase("find the operation"), contextlib.suppress(Exception):
            found = _causes(part, run, request, differences)
    listed: dict[tuple[str, str], list[str]] = {}
    for difference, cause in zip(differences, found):
        case, probe = difference.case, difference.case.probe
        where = f"{case.signature}: {difference.output}"
        if cause is not None and cause.usual and not probe.input:
            raise ValidationError(
                "A result of the exported model differs from the model's.",
                where=f"{where}, where inputs are up to 1e4",
                got=f"{cause.text}{f' in {cause.path}' if cause.path else ''}",
                write="validate=False to look at the export all the same, and please report it",
            )
        named = "" if cause is None else f"{cause.text}{f' in {cause.path}' if cause.path else ''}"
        what = f"where {probe.input} is" if probe.input else "where inputs are up to 1e4"
        values = listed.setdefault((named, f"{where} {what}"), [])
        if probe.input:
            values.append(probe.value)
    run.budget.differs += [
        f"differs from jax at: {text}"
        for (named, where), values in listed.items()
        for text in [
            f"{named} ({where} {', '.join(values)})" if named else f"{where} {', '.join(values)}"
        ]
    ]


def _causes(
    part: Writer, run: ExportRun, request: Request, differences: Sequence[Difference]
) -> list[Cause | None]:
    """The operation that is the cause of each difference, where it is one that can be swept."""
    labelled, _ = with_paths(request.model)
    with traced_anew():
        model, programs = part.trace(dataclasses.replace(request, model=labelled))

    def call_part(model: Exportable, program: Program, inputs: Arrays) -> Arrays:
        copied = copy.copy(part)
        copied.lower(model, (program,))
        with scratch_place(part.format) as place:
            copied.write(place)
            case = Case(program.key, inputs, {})
            here = copied.run_here() if copied.one_by_one else None
            return call(part.format, place, [case], run.separate, here)[0]

    found: dict[int, Cause | None] = {}
    for program in programs:
        these = [at for at, each in enumerate(differences) if each.case.signature == program.key]
        wrong = [(differences[at].case.inputs, differences[at].output) for at in these]
        if wrong:
            found.update(zip(these, causes(model, program, wrong, call_part, part.factor)))
    return [found.get(at) for at in range(len(differences))]


def _name(error: ValidationError, writer: Writer, run: ExportRun, request: Request) -> None:
    """Adds to an error where jax and the export part, for results that differ."""
    part = writer.for_part()
    if part is None or isinstance(error, GradientMismatchError) or not_finite(writer.stored()):
        return  # weights that are no numbers are a reason, and no operation is to blame
    model, kinds = with_paths(request.model)

    def test(model: Exportable, program: Program, place: Path) -> None:
        copied = copy.copy(part)
        copied.budget = Budget()
        copied.lower(model, (program,))
        copied.write(place)
        copied.test(place, run)

    def find() -> Parting | None:
        run.budget = Budget()
        with traced_anew():
            traced = part.trace(dataclasses.replace(request, model=model))
        return parting(writer.format, *traced, kinds, error, test)

    with run.phase("find the operation"):
        named(error, find)


def _test(writer: Writer, place: Path, run: ExportRun) -> dict[str, float]:
    """Tests what was written; where it differs, weights that are no numbers are the reason."""
    writer.budget = run.budget
    try:
        return writer.test(place, run)
    except ValidationError as error:
        names = not_finite(writer.stored())
        if not names:
            raise
        raise ValidationError(
            "The model has weights that are NaN or infinite, and with such numbers "
            f"{writer.format.title} computes something else than jax.",
            where=names,
            got=f"{error.where}: {error.got}",
            write="finite weights, from before the training diverged; or validate=False to look "
            "at the export all the same",
        ) from error


def not_finite(weights: Mapping[str, Any]) -> str:
    """The names of weights that hold NaN or infinity, a few of them; empty if there are none."""
    names = [name for name, value in weights.items() if not _is_finite(value)]
    return a_few(names, _FEW)


def _is_finite(value: Any) -> bool:
    array = np.asarray(value)
    if not is_inexact(array.dtype):
        return True
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return bool(np.isfinite(array.astype(wide)).all())


def _report(writer: Writer, place: Path, run: ExportRun, errors: dict[str, float]) -> Report:
    facts = {"oldest_tensorflow": "", "stablehlo": "", "calling_convention": 0}
    facts |= writer.facts(place)
    untested = [key for key in facts["signatures"] if run.calls and not _is_tested(key, errors)]
    return Report(
        model=writer.name,
        variables=tuple(writer.variables),
        variable_bytes=sum(each.bytes for each in writer.variables),
        validated=None if len(untested) == len(facts["signatures"]) else run.validated,
        left_out=(
            *run.budget.left_out,
            *(f"{key}: no call was found that gives an element to compare" for key in untested),
        ),
        differs=tuple(run.budget.differs),
        largest_error=errors,
        seconds=run.wall_time,
        target=writer.format.name,
        **facts,
    )


def _is_tested(key: str, errors: Mapping[str, float]) -> bool:
    """Whether an element of an output of this signature was compared."""
    names = (name.removeprefix(f"{key}: ") for name in errors if name.startswith(f"{key}: "))
    return any(not name.startswith(("gradient:", "variable:")) for name in names)
