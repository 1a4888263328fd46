"""Certifies an export: runs its calls in every installed runtime.

Each runtime runs in a process of its own with a time limit. Results are compared with the model in
jax, if given, otherwise with the runtime that the export was written for.
"""

from __future__ import annotations

import dataclasses
import importlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pax_export._foundations.errors import (
    InvalidArgumentError,
    MissingPackageError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export._foundations.optional import find
from pax_export.export.artifact import formats, own_exports
from pax_export.export.artifact.report import CERTIFIED, certified_text, read_report
from pax_export.export.validation import recheck
from pax_export.export.validation.validate import NO_CALL, Case, compare_either

if TYPE_CHECKING:
    from pax_export.export.artifact.dimensions import RandomCall
    from pax_export.export.tracing.exportable import Model
    from pax_export.export.validation.serve import Arrays

#: The model itself, in jax.
JAX = "jax"


@dataclass(frozen=True)
class RuntimeResult:
    """The result of one runtime.

    Attributes:
        runtime: the name of the runtime.
        version: its version; empty if unknown.
        machine: system, processor and Python.
        calls: the number of calls.
        compared_with: ``"jax"``, the name of another runtime, or empty for no comparison.
        largest_error: the largest absolute difference of any output.
        problem: the runtime's refusal or the difference; empty if there is none.
        differs: whether the problem is a different result.
    """

    runtime: str
    version: str
    machine: str
    calls: int
    compared_with: str = ""
    largest_error: float | None = None
    problem: str = ""
    differs: bool = False

    def __str__(self) -> str:
        return certified_text(self.runtime, _plain_fields(self))


def certify(
    path: Path,
    model: Model | None = None,
    methods: Mapping[str, str] | None = None,
    *,
    runtimes: Sequence[str] = (),
    seconds: float | None = None,
    write: bool = True,
    trusted: bool = False,
) -> list[RuntimeResult]:
    """Runs the calls of an export in several runtimes, and writes the results into its report.

    Args:
        path: the path of the export.
        model: the exported model, to compare with.
        methods: the method of each signature, if its name differs.
        runtimes: the names of the runtimes; default: all installed ones.
        seconds: the time limit of each runtime.
        write: whether to update the report and the card.
        trusted: as for `load`.

    Raises:
        ValidationError: the results of the format's own runtime do not match the report.
        PaxError: other errors, as for `load`.
    """
    report = read_report(path)
    format = formats.find(report.target)
    if format is None or not format.runtime[0]:
        raise InvalidArgumentError(
            "Exports for this target cannot be certified.", where=str(path), got=report.target
        )
    others: Any = importlib.import_module(format.others) if format.others else None
    chosen = _choose_runtimes(tuple(others.NAMES) if others else (), runtimes, format.runtime[0])
    find(*format.runtime, "certify")
    asked = [name for name in chosen if _can_run(others, name, name in runtimes)]
    if write:
        own_exports.check_writable(path)
    done = recheck.Rechecked(path, model, methods, finite=False, trusted=trusted)
    if failed := [each for each in done.checks if each.problem]:
        raise ValidationError("The export is not valid.", where=str(path), got=str(failed[0])[:500])
    results = [_own_result(format.runtime[0], done)]
    results += [_run_elsewhere(others, name, path, done, seconds) for name in asked]
    if write:
        by_runtime = {each.runtime: _plain_fields(each) for each in results}
        old = report.details.get(CERTIFIED)
        earlier = {} if not isinstance(old, dict) else old
        details = report.details | {CERTIFIED: earlier | by_runtime}
        own_exports.replace_report(path, dataclasses.replace(report, details=details))
    return results


def _choose_runtimes(names: Sequence[str], wanted: Sequence[str], own: str) -> list[str]:
    if unknown := [name for name in wanted if name not in (own, *names)]:
        raise InvalidArgumentError(
            "None of these runtimes reads this export.",
            got=", ".join(unknown),
            write=", ".join((own, *names)),
        )
    return [name for name in names if not wanted or name in wanted]


def _can_run(others: ModuleType, name: str, is_asked_for: bool) -> bool:
    try:
        others.check([name], f"certify in {name}")
    except MissingPackageError:
        if is_asked_for:
            raise
        return False
    return True


def _own_result(name: str, done: recheck.Rechecked) -> RuntimeResult:
    errors = [error for check in done.checks for error in check.largest_error.values()]
    with_jax = JAX if done.reference is not None else ""
    largest = max(errors, default=0.0) if with_jax else None
    result = RuntimeResult(
        name, _version(name), _machine(), len(_compared(done)), with_jax, largest
    )
    return result if result.calls else dataclasses.replace(result, problem=NO_CALL)


def _compared(done: recheck.Rechecked) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """The answers with any element."""
    return [each for each in done.answers if any(v.size for v in each[2]["results"].values())]


def _run_elsewhere(
    others: ModuleType, name: str, path: Path, done: recheck.Rechecked, seconds: float | None
) -> RuntimeResult:
    base = JAX if done.reference is not None else "".join(done.format.runtime[:1])
    answers = _compared(done)
    result = RuntimeResult(name, others.version(name), _machine(), len(answers), base)
    if not answers:
        return dataclasses.replace(result, compared_with="", problem=NO_CALL)
    cases = [{"inputs": call.inputs} for _, call, _ in answers]
    try:
        options = {} if seconds is None else {"seconds": seconds}
        found = others.run(name, str(path.absolute()), cases, **options)
        errors = [_largest_error(done, *each, got) for each, got in zip(answers, found)]
    except UnsupportedOperationError as error:
        return dataclasses.replace(result, compared_with="", problem=f"{error.what} {error.got}")
    except ValidationError as error:
        text = f"{error.what} {error.where}: {error.got}"
        return dataclasses.replace(result, problem=text, differs=True)
    return dataclasses.replace(result, largest_error=max(errors, default=0.0))


def _largest_error(
    done: recheck.Rechecked, key: str, call: RandomCall, answer: Mapping[str, Any], got: Arrays
) -> float:
    if done.reference is not None:
        errors = done.reference.differences(key, call, done.report.signatures[key], got)
    else:
        case = Case(key, call.inputs, answer["results"], label=call.label)
        errors = compare_either(case, got)
    return max(errors.values(), default=0.0)


def _plain_fields(result: RuntimeResult) -> dict[str, Any]:
    """The result as the report has it, without empty fields and long texts."""
    fields = dataclasses.asdict(result) | {"problem": " ".join(result.problem.split())[:300]}
    del fields["runtime"]
    return {name: value for name, value in fields.items() if value or isinstance(value, float)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> str:
    python = f"Python {platform.python_version()}"
    return f"{platform.system()} {platform.machine()}, {python}"
