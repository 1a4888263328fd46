"""Runs an export: check, load, trace, lower, write, validate, report, move to its path."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.check import checked_choice
from pax_export._foundations.errors import (
    GradientMismatchError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotValidatedWarning,
    PaxError,
    ValidationError,
    a_few,
    hide_frames,
)
from pax_export._foundations.optional import find, install, is_installed
from pax_export.core import traced_anew
from pax_export.export.artifact.options import Request, check_state
from pax_export.export.artifact.report import Report, is_tested
from pax_export.export.pipeline.bisect import (
    Divergence,
    first_divergences,
    name_modules,
    with_paths,
)
from pax_export.export.pipeline.format_exporter import Contents, FormatExporter
from pax_export.export.pipeline.phases import CALLS, ExportRun, check_validate, scratch_path
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable
from pax_export.export.tracing.programs import Program
from pax_export.export.validation.probes import Budget, ProbeDifference
from pax_export.export.validation.validate import (
    NO_CALL,
    Case,
    call_export,
    count_not_finite,
    differences,
)

#: The number of weights named in one message.
_FEW = 8
#: Seconds after which a search for an operation exports no further part: where extreme inputs give
#: other results, and where the validation fails.
_SECONDS, _PATIENCE = 10.0, 120.0


def run_export(exporter: FormatExporter, request: Request) -> Report:
    """Makes one export, atomically; raises a subclass of PaxError."""
    check_state(request.state, updates=exporter.updates_state)
    checked_choice(request.outputs, ("float32", "model"), "outputs")
    check_validate(request.validate, exporter.format)
    if not (request.quantization is None or hasattr(request.quantization, "summary")):
        raise InvalidArgumentTypeError(
            "quantization: expected the report of pax.quantize.",
            got=repr(request.quantization)[:100],
            write="small, report = pax.quantize(net, [x]), and quantization=report",
        )
    validate, left_out = request.validate, []
    if obstacle := _obstacle(exporter, request):
        reason, write = obstacle
        warnings.warn(_not_validated(request, reason, write), stacklevel=3)
        validate, left_out = False, [f"not validated: {reason}"]
    loads = exporter.loads or (exporter.runtime and validate in (True, "full"))
    run = ExportRun(
        exporter.format,
        request.path,
        validate=validate,
        overwrite=request.overwrite,
        phases=5 if loads else 4,
        card=request.card,
    )
    run.budget.left_out += left_out
    with run:
        exporter.find(request)
        try:
            return _Export(exporter, request, run).write()
        except Exception as error:  # raised again with fewer frames
            if isinstance(error, PaxError):
                name_modules(error, exporter, request)
            hide_frames(error)
            raise


def _obstacle(exporter: FormatExporter, request: Request) -> tuple[str, str] | None:
    """Why the export cannot be called here, and the fix; raises if the user asked for the calls."""
    package, extra = exporter.format.runtime
    calls = request.validate in CALLS
    if exporter.runtime and calls:
        if request.validate is not True:
            find(package, extra, f"{exporter.format.exporter}(..., validate={request.validate!r})")
        if not is_installed(package):
            return f"{exporter.runtime} is not installed", f"{install(extra)}, or validate=False"
    platforms = ", ".join(exporter.other_platforms(request))
    if not platforms or not calls:
        return None
    here = jax.export.default_export_platform()
    if request.validate is not True:
        raise InvalidArgumentError(
            "The validation calls the export, and this process has none of its platforms.",
            where="platforms",
            got=f"{platforms}, validate={request.validate!r} on {here}",
            write=f"platforms=[..., {here!r}], or validate=False",
        )
    return (
        f"it is for {platforms}, and this process runs on {here}",
        "validate=False, and pax-export validate on such a machine",
    )


def _not_validated(request: Request, reason: str, write: str) -> NotValidatedWarning:
    what = f"The export is not validated: {reason}."
    return NotValidatedWarning(what, where=str(request.path), write=write)


@dataclasses.dataclass(frozen=True)
class _Export:
    """One export on its way to its path."""

    exporter: FormatExporter
    request: Request
    run: ExportRun

    def write(self) -> Report:
        run = self.run
        contents = self.exporter.make(run, self.request)
        with run.place() as path:
            while True:
                with run.phase("write"):
                    written = contents.write(path)
                if self.exporter.tests_reported:
                    report = self._make_report(contents, path, written, {})
                    contents.write_report(report, path, written)
                try:
                    errors = self._test(contents, path, written)
                    break
                except ValidationError as error:
                    other = contents.instead(error)
                    if other is None:
                        self._locate_divergence(error, contents)
                        raise
                    contents = other
                    for each in path.iterdir():
                        shutil.rmtree(each) if each.is_dir() else each.unlink()
            report = self._make_report(contents, path, written, errors)
            if run.calls and report.validated is None:
                write = (
                    "examples=, or specs with other sizes, outside of jax.set_mesh (a program for "
                    "several devices is not called)"
                )
                warnings.warn(_not_validated(self.request, NO_CALL, write), stacklevel=4)
            run.write_card(report, path)
            contents.write_report(report, path, written)
        run.clear()
        return report

    def _test(self, contents: Contents, path: Path, written: object) -> dict[str, float]:
        """Validates the export; a failure is attributed to non-finite weights if there are any."""
        exporter, run = self.exporter, self.run
        if exporter.runtime and run.calls and not run.separate:
            with run.loading(exporter.runtime, exporter.format.runtime[0]):
                exporter.load(self.request)
        try:
            errors = run.tested(lambda: contents.test(exporter, path, run))
        except ValidationError as error:
            names = not_finite(contents.stored())
            if not names:
                raise
            raise ValidationError(
                f"The model has NaN or infinite weights, for which {exporter.format.title} "
                "computes other results than jax.",
                where=names,
                got=f"{error.where}: {error.got}",
                write="finite weights, from before the training diverged; or validate=False to "
                "look at the export all the same",
            ) from error
        self._list_differences(contents)
        return errors

    def _list_differences(self, contents: Contents) -> None:
        """Records differences for extreme inputs, with the operations behind them."""
        budget, part = self.run.budget, contents.part(self.exporter)
        far = budget.differences
        if not far:
            return
        found: list[Divergence | None] = [None] * len(far)
        if part is not None and not not_finite(contents.stored()):
            # It only adds detail: a failure here must not hide the report.
            with self.run.phase("find the operation"), contextlib.suppress(Exception):
                found = self._find_operations(part, far)
        listed: dict[tuple[str, str, str], list[str]] = {}
        for difference, divergence in zip(far, found):
            case, probe = difference.case, difference.case.probe
            only = f" in {difference.only} alone" if difference.only else ""
            what = f"where {probe.input} is" if probe.input else "where inputs are up to 1e4"
            where = f"{case.signature}: {difference.output} {what}"
            values = listed.setdefault((only, _named(divergence), where), [])
            if probe.input:
                values.append(probe.value)
        for (only, operation, where), values in listed.items():
            location = f"{where} {', '.join(values)}".strip()
            at = f"{operation} ({location})" if operation else location
            budget.differs.append(f"differs from jax{only} at: {at}")

    def _find_operations(
        self, part: FormatExporter, far: Sequence[ProbeDifference]
    ) -> list[Divergence | None]:
        """The operation behind each difference, by exporting parts."""
        model, programs, _ = self._trace_parts(part)
        leaves = [dtypes.store(leaf.value) for leaf in model.leaves]

        def apart(cases: Sequence[Case], program: Program) -> list[str]:
            """The outputs of a part that differ from jax, for each case."""
            contents = part.lower(model, (program,), self.request)
            with scratch_path(part.format) as path:
                contents.write(path)
                calls = [Case(program.key, case.inputs, {}) for case in cases]
                here = part.run_here() if part.one_by_one else None
                results = call_export(part.format, path, calls, self.run.separate, here)
            found: list[str] = []
            for case, got in zip(cases, results):
                inputs = [case.inputs[entry.name] for entry in program.inputs.flat]
                values = program.traced.run([*leaves, *inputs])
                expected = dict(zip(program.output_names, values))
                case = dataclasses.replace(case, expected=expected)
                found.append(", ".join(each.output for each in differences(case, got, part.factor)))
            return found

        by_case: dict[int, Divergence | None] = {}
        for program in programs:
            these = (each.case for each in far if each.case.signature == program.key)
            if cases := list({id(case): case for case in these}.values()):
                test = functools.partial(apart, cases)
                end = time.perf_counter() + _SECONDS
                found = first_divergences(program, len(cases), test, end, {})
                by_case.update(zip(map(id, cases), found))
        return [by_case.get(id(each.case)) for each in far]

    def _locate_divergence(self, error: ValidationError, contents: Contents) -> None:
        """Adds to an error where jax and the export begin to differ, for results that do."""
        part, run = contents.part(self.exporter), self.run
        if part is None or isinstance(error, GradientMismatchError):
            return
        if not_finite(contents.stored()):
            return  # they are the cause, not an operation
        where, end = error.where or "", time.perf_counter() + _PATIENCE
        # It only improves a message: a failure here must not hide the error.
        with run.phase("find the operation"), contextlib.suppress(Exception):
            model, programs, kinds = self._trace_parts(part)

            def apart(program: Program) -> list[str]:
                run.budget = Budget()
                contents = part.lower(model, (program,), self.request)
                try:
                    contents.test_apart(part, run)
                except ValidationError as error:
                    return [str(error.got)]
                return [""]

            key = where.split(" ")[0].rstrip(":")
            for program in sorted(programs, key=lambda each: each.key != key):
                (first,) = first_divergences(program, 1, apart, end, kinds, "variable:" in where)
                if first is not None:
                    error.parting = first
                    error.where = f"{where}; first at {first}" if where else f"{first}"
                    if first.apart != error.got:
                        error.got = f"{error.got}; there {first.apart}"
                    return

    def _trace_parts(
        self, part: FormatExporter
    ) -> tuple[Exportable, Sequence[Program], dict[str, str]]:
        """The model and its programs with the paths of modules, and the classes of these."""
        labeled, kinds = with_paths(self.request.model)
        with traced_anew():
            model, programs = part.trace(dataclasses.replace(self.request, model=labeled))
        return model, programs, kinds

    def _make_report(
        self, contents: Contents, path: Path, written: object, errors: dict[str, float]
    ) -> Report:
        run, request = self.run, self.request
        fields: dict[str, Any] = {"oldest_tensorflow": "", "stablehlo": "", "calling_convention": 0}
        fields |= contents.report_fields(path, written, run)
        if request.quantization is not None:
            details = fields.get("details", {})
            lost = {"weights lose": request.quantization.summary()}
            fields["details"] = details | {"quantized": details.get("quantized", {}) | lost}
        keys = fields["signatures"]
        untested = [key for key in keys if run.calls and not is_tested(key, errors)]
        return Report(
            model=contents.name,
            variables=tuple(contents.variables),
            variable_bytes=sum(each.bytes for each in contents.variables),
            validated=None if len(untested) == len(keys) else run.validated,
            left_out=(*run.budget.left_out, *(f"{key}: {NO_CALL}" for key in untested)),
            differs=tuple(run.budget.differs),
            largest_error=errors,
            seconds=run.wall_time,
            target=self.exporter.format.name,
            **fields,
        )


def _named(divergence: Divergence | None) -> str:
    """An operation and its module, or its line; "" if it was not found."""
    if divergence is None:
        return ""
    location = divergence.path or divergence.source
    return f"{divergence.named} in {location}" if location else divergence.named


def not_finite(weights: Mapping[str, Any]) -> str:
    """Formats the names of some weights with NaN or infinity; empty if there are none."""
    names = [name for name, value in weights.items() if count_not_finite(np.asarray(value))]
    return a_few(names, _FEW)
