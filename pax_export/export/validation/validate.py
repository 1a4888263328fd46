"""Calls an export and compares with the expected results."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pax_export._foundations.errors import (
    GradientMismatchError,
    InvalidArgumentError,
    PaxError,
    ValidationError,
)
from pax_export._foundations.files import atomic, system
from pax_export._foundations.types import ArrayLike
from pax_export.export.artifact.dimensions import is_inexact
from pax_export.export.artifact.formats import Format, import_function
from pax_export.export.validation import serve
from pax_export.export.validation.probes import Probe, ProbeDifference
from pax_export.export.validation.serve import Arrays, Run

#: Why a validation proves nothing.
NO_CALL = "no call was found that gives an element to compare"


def validate(
    format: Format,
    path: Path,
    cases: Iterable[Case],
    separate: bool,
    factor: float = 1.0,
    here: Run | None = None,
) -> dict[str, float]:
    """Runs all calls of an export; returns the largest difference of each non-empty result.

    It runs in a fresh process without jax if `separate`, or with `here` in this process, which
    requests calls one by one. `factor` multiplies the tolerance, for numbers stored with fewer
    bits.
    """
    cases_so_far: list[Case] = []
    try:
        results = _call_results(format, path, iter(cases), cases_so_far, separate, here)
    except PaxError:
        raise
    except Exception as error:  # of any runtime; quoted by the error
        message = f"{type(error).__name__}: {error}"[-2000:]
        if any(case.cotangents for case in cases_so_far):
            # Errors in usual calls come first.
            plain = [case.without_gradients() for case in cases_so_far]
            validate(format, path, plain, separate, factor, here)
            raise GradientMismatchError(
                "The gradient of the exported model cannot be computed.",
                got=message,
                write="trainable=False, or of to_saved_model vjp_order=0, if gradients are not "
                "needed; please report this",
            ) from error
        processed = any(case.stage == "all" for case in cases_so_far)
        advice = next((case.advice for case in cases_so_far if case.advice), None)
        raise ValidationError(
            "The exported model cannot be called.",
            got=message,
            write="examples=[...], arguments that the preprocessor can read"
            if processed
            else advice,
        ) from error
    errors: dict[str, float] = {}
    for case, got in zip(cases_so_far, results):
        if case.probe is not None:
            case.probe.differences.extend(differences(case, got, factor))
            continue
        assert not isinstance(got, str)
        if case.expect is not None:  # the right result depends on the preprocessor's
            case.expected = case.expect(got)
        for name, difference in compare_either(case, got, factor).items():
            key = f"{case.signature}: {name}"
            value = got[name] if name in got else case.unchanged[name]
            if np.size(value):  # an empty result proves nothing
                errors[key] = max(difference, errors.get(key, 0.0))
    return errors


def _call_results(
    format: Format,
    path: Path,
    cases: Iterator[Case],
    cases_so_far: list[Case],
    separate: bool,
    here: Run | None,
) -> list[Arrays | str]:
    """Returns the results of each call; for a failed call with extreme inputs, its error."""
    if separate:
        cases_so_far.extend(cases)
        calls = [case.call() for case in cases_so_far]
        if all(case.probe is None for case in cases_so_far):
            return [each["results"] for each in in_process(format, path, calls, "all")]
        answers = in_process(format, path, calls, "each")
        for case, answer in zip(cases_so_far, answers):
            if "error" in answer and case.probe is None:
                raise RuntimeError(answer["error"])
        return [each["error"] if "error" in each else each["results"] for each in answers]
    failed: dict[int, str] = {}
    broken: list[Exception] = []

    def asked() -> Iterator[Case]:
        yield from (case for index, case in enumerate(cases_so_far[:]) if index not in failed)
        while True:
            try:
                case = next(cases)
            except StopIteration:
                return
            except Exception as error:  # of the model, not of the runtime
                broken.append(error)
                raise
            cases_so_far.append(case)
            yield case

    while True:
        try:
            got = iter(call_export(format, path, asked(), False, here))
            return [failed[at] if at in failed else next(got) for at in range(len(cases_so_far))]
        except Exception as error:  # of the runtime; raised again but for calls with odd numbers
            last = len(cases_so_far) - 1
            if broken or not cases_so_far or cases_so_far[last].probe is None or last in failed:
                raise
            failed[last] = f"{type(error).__name__}: {error}"


def differences(case: Case, got: Arrays | str, factor: float) -> Iterator[ProbeDifference]:
    """The outputs of a probing call that differ from jax by more than rounding, NaN aside."""
    probe = case.probe
    for name, expected in case.expected.items():
        if isinstance(got, str) or name not in got:
            yield ProbeDifference(case, name)
            continue
        one, other = np.asarray(expected), np.asarray(got[name])
        tiny = _TINY if one.dtype.name in TOLERANCE else None
        try:
            if probe is not None and probe.input:
                _largest_difference(one, other, name, factor, tolerance=tiny)
                continue
            if tiny is not None and one.shape == other.shape:
                other = np.where(np.isfinite(widen(one)), other, one)
            only = dataclasses.replace(case, expected={name: one}, unchanged={})
            compare_either(only, {name: other}, factor)
        except ValidationError:
            yield ProbeDifference(case, name, _differs_only_in(one, other, factor))


def _differs_only_in(expected: np.ndarray, got: np.ndarray, factor: float) -> str:
    """Returns what a difference consists of only: ``NaN`` in one result, or ``signs``."""
    relative = TOLERANCE.get(expected.dtype.name, 0.0)
    if not relative or expected.shape != got.shape:
        return ""
    wrong, _ = far_apart(
        expected.ravel(), got.ravel(), factor * relative, largest_size(expected), _TINY
    )
    one, other = widen(expected).ravel()[wrong], widen(got).ravel()[wrong]
    if np.all(np.isnan(one) != np.isnan(other)):
        return "NaN"
    return "signs" if np.all(np.abs(one) == np.abs(other)) else ""


def call_export(
    format: Format, path: Path, cases: Iterable[Case], separate: bool, here: Run | None = None
) -> list[Arrays]:
    """The results of all calls, made here or in a fresh process without jax."""
    calls = (case.call() for case in cases)
    if separate:
        return [entry["results"] for entry in in_process(format, path, list(calls), "all")]
    return here(str(path), calls) if here else import_function(format.run)(str(path), list(calls))


def in_process(
    format: Format,
    path: Path,
    calls: serve.Cases,
    mode: Literal["all", "each", "once"],
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Makes calls in a fresh process: ``{"results": arrays by name}`` for each.

    With ``"each"``, failures are ``{"error": message}``; with ``"once"``, the first failure is
    the only result.

    Raises:
        RuntimeError: the process failed.
        TimeoutError: it took more seconds than that, and was killed with all that it started.
    """
    module, _, function = format.run.partition(":")
    spec: Any = importlib.util.find_spec(module)
    with atomic.scratch() as folder:
        cases, results = Path(folder, "cases.npz"), Path(folder, "results.npz")
        serve.save(cases, calls)
        program = [sys.executable, serve.__file__, f"{spec.origin}:{function}", str(path)]
        # For a format that needs this package, wherever it was imported from.
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(folder)}
        code, stderr = _run_limited(
            [*program, str(cases), str(results), mode, *format.run_imports],
            {**os.environ, **paths},
            seconds,
        )
        if code:
            _refuse_import(format, stderr)
            by = f"killed by signal {-code}; " if code < 0 else ""
            raise RuntimeError(by + stderr[-1500:])
        return serve.load(results)


def _run_limited(
    command: list[str], environment: dict[str, str], seconds: float | None
) -> tuple[int, str]:
    """Runs a program; returns its exit code and its standard error."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,  # to kill its subprocesses, too
    ) as process:
        try:
            _, stderr = process.communicate(timeout=seconds)
        except BaseException as error:
            system.kill_session(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"it had not finished after {seconds:g} s") from None
            raise
    return process.returncode, stderr


def _refuse_import(format: Format, stderr: str) -> None:
    """Says so if calls failed because their process may not import a package."""
    found = re.search(r"(?:import of |No module named ')(jax|pax_export)", stderr)
    package = found[1] if found else ""
    if package and package not in format.run_imports:
        raise InvalidArgumentError(
            f"`run` of the format {format.name} imports {package}, and its process has it only "
            "where the format's row says so.",
            where=format.run,
            got=f"run_imports={format.run_imports}",
            write=f"run_imports={(*format.run_imports, package)}",
        )


_GRADIENT = ": gradient:"
#: Smaller numbers are flushed to zero in some runtimes, and in jax on some processors.
_TINY = float(np.finfo(np.float32).tiny)
#: The number of elements compared at a time.
_PIECE = 1 << 18
#: How far two programs for one computation may differ, relative to its size.
TOLERANCE = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 2e-4,
    "complex64": 2e-4,
    "bfloat16": 3e-2,
    "float16": 5e-3,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}


#: Results; a tolerance for each beyond that of its dtype: a number, or for integers a mask of the
#: elements that may differ; and a factor of the tolerance of the dtypes.
Alternative = tuple[dict[str, np.ndarray], Mapping[str, Any], float]


@dataclass
class Case:
    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
    label: str = ""
    #: Results that are as right, where rounding or another choice changes those of jax.
    alternatives: Callable[[], Iterable[Alternative]] | None = None
    unchanged: dict[str, Any] = field(default_factory=dict)  # the default of a missing result
    stage: str = ""  # "model": without its processors; "all": one after the other
    expect: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    advice: str = ""  # advice if random inputs may be the cause of a failure
    probe: Probe | None = None  # of a call far from the usual ones

    def without_gradients(self) -> Case:
        rest = {k: v for k, v in self.expected.items() if not k.startswith("gradient:")}
        return dataclasses.replace(self, expected=rest, cotangents={})

    def call(self) -> dict[str, Any]:
        """Returns the call without its expected results, for a separate process."""
        names = ("signature", "inputs", "cotangents", "stage")
        return {name: getattr(self, name) for name in names}


def compare_either(
    case: Case, got: Mapping[str, np.ndarray], factor: float = 1.0
) -> dict[str, float]:
    """Compares with jax's results, or with results that are as right."""
    try:
        return compare_results(case, got, factor)
    except ValidationError as error:
        for found, tolerance, times in case.alternatives() if case.alternatives else ():
            expected = {name: found.get(name, value) for name, value in case.expected.items()}
            other = dataclasses.replace(case, expected=expected)
            with suppress(ValidationError):
                return compare_results(other, got, factor * times, tolerance)
        raise _add_advice(error, case) from None


def _add_advice(error: ValidationError, case: Case) -> ValidationError:
    """The error, with advice where random inputs may be the reason."""
    count = sum(count_not_finite(value) for value in case.expected.values())
    if not case.advice and any(map(count_not_finite, case.inputs.values())):
        error.write = f"{_FINITE}; or {error.write}" if error.write else _FINITE
    if case.advice:
        error.write = f"{case.advice}; or {error.write}" if error.write else case.advice
        if count:
            error.got = f"{error.got}; of these inputs jax itself gives {count} NaN or infinity"
    return error


#: Advice if a user's example contains NaN.
_FINITE = (
    "an example without NaN and infinity: of these, decompositions of matrices, loops that wait "
    "until something is small, and random draws give one thing in jax and another elsewhere"
)


def count_not_finite(values: np.ndarray) -> int:
    """Returns the number of NaN and infinities."""
    if not is_inexact(values.dtype):
        return 0
    return sum(int((~np.isfinite(widen(piece))).sum()) for piece in _in_chunks(values))


def compare_results(
    case: Case,
    got: Mapping[str, np.ndarray],
    factor: float = 1.0,
    tolerance: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """The largest difference of each result, at most its dtype's `TOLERANCE` times a factor."""
    where = f"{case.signature} {case.label}".strip()
    all_expected, got = {**case.unchanged, **case.expected}, {**case.unchanged, **got}
    if sorted(got) != sorted(all_expected):
        raise ValidationError(
            "The exported model returns different results than the model.",
            where=where,
            got=f"{sorted(got)} instead of {sorted(all_expected)}",
        )
    # If gradients cancel out, only rounding remains; the other gradients bound it.
    gradients = [v for name, v in case.expected.items() if name.startswith("gradient:")]
    scale = 0.01 * max(map(largest_size, gradients), default=0.0)
    return {
        name: _largest_difference(
            np.asarray(expected),
            np.asarray(got[name]),
            f"{where}: {name}",
            factor,
            scale if name.startswith("gradient:") else 0.0,
            (tolerance or {}).get(name),
        )
        for name, expected in all_expected.items()
    }


def _largest_difference(
    expected: np.ndarray,
    got: np.ndarray,
    where: str,
    factor: float,
    scale: float = 0.0,
    tolerance: float | np.ndarray | None = None,
) -> float:
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        raise ValidationError(
            "A result of the exported model has a different shape or dtype.",
            where=where,
            got=f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}",
        )
    relative = TOLERANCE.get(expected.dtype.name, 0.0)
    largest = max(largest_size(expected), scale) if relative else 0.0
    count, of_nan, difference = 0, 0, 0.0
    free: Iterable[Any] = itertools.repeat(np.False_)
    if tolerance is not None and not relative:
        free = _in_chunks(np.asarray(tolerance))
    for one, other, may_differ in zip(_in_chunks(expected), _in_chunks(got), free):
        if relative:
            wrong, apart = far_apart(one, other, factor * relative, largest, tolerance or 0.0)
        else:
            wrong = (one != other) & ~may_differ
            apart = one.astype(object) - other if wrong.any() else wrong
        count += int(np.count_nonzero(wrong))
        if relative and wrong.any():
            nan = np.isnan(widen(one)) != np.isnan(widen(other))
            of_nan += int(np.count_nonzero(nan))
            apart = apart[~nan]
        difference = max(difference, float(np.max(np.abs(apart), initial=0.0)))
    if count:
        far = _how_far(count, of_nan, difference)
        kind = GradientMismatchError if _GRADIENT in where else ValidationError
        raise kind(
            "A result of the exported model differs from the model's.",
            where=where,
            got=f"{count} of {expected.size} elements differ, {far}",
            write="validate=False to look at the export all the same, and please report it",
        )
    return difference


def _how_far(count: int, of_nan: int, difference: float) -> str:
    """The distance of elements where some are NaN in the model or the export alone."""
    only = "NaN in one of the two"
    if of_nan == count:
        return only
    far = f"by {difference:.3g} at most"
    return f"{far}; {of_nan} of them {only}" if of_nan else far


def far_apart(
    one: np.ndarray,
    other: np.ndarray,
    relative: float,
    largest: float,
    tolerance: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which elements differ too much, and by how much."""
    one, other = widen(one), widen(other)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    size = np.where(np.isfinite(one), np.abs(one), 0.0)
    # `not <=` is true for NaN, so a NaN in only one of them is an error.
    return ~(apart <= relative * (size + 0.1 * largest) + tolerance), apart


def widen(values: np.ndarray) -> np.ndarray:
    is_complex = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _in_chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """The elements in order, in chunks that keep wider copies small."""
    flat = values.reshape(-1)
    return (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))


def largest_size(values: ArrayLike) -> float:
    """The largest size of a number that has one."""
    largest = 0.0
    for piece in map(widen, _in_chunks(np.asarray(values))):
        sizes = np.abs(piece)
        largest = max(largest, float(np.max(sizes, initial=0.0, where=np.isfinite(sizes))))
    return largest
