"""One model in one format: written, served, compared with jax, and classed."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pax_export.errors import PaxError, UnsupportedOperationError, ValidationError
from tests.closeness import assert_close
from tests.models.formats import ELSEWHERE, FORMATS, GRADIENTS, OTHERS, Served, Subject
from tests.models.registry import Model

RIGHT, STATIC, REFUSED = "right", "static", "refused"
#: An error of ours that does not say what, where and in which line.
UNCLEAR = "unclear"
RAW, DEAD, WRONG = "raw", "dead", "wrong"
BAD = (UNCLEAR, RAW, DEAD, WRONG)

ROOT = Path(__file__).parent.parent.parent
_LINE = re.compile(r"\.py:\d+")


#: What is odd about it, its inputs, and what jax gives.
Call = tuple[str, tuple[np.ndarray, ...], list[np.ndarray]]


@dataclass
class Outcome:
    """How it went; of a model with fixed sizes, `symbolic` says how it went without."""

    outcome: str
    error: str = ""  # the first line
    where: str = ""  # of the model, or the call that was wrong
    details: str = ""
    seconds: float = 0.0  # until it was written
    validation: float = 0.0  # of these
    symbolic: str = ""
    largest: float = 0.0  # difference from jax, see `_distance`

    def __post_init__(self):
        self.error, self.where = tidy(self.error)[:300], tidy(self.where)[:300]

    def as_dict(self) -> dict[str, object]:
        found = {name: value for name, value in asdict(self).items() if value}
        return found | ({"largest": self.largest} if self.outcome in (RIGHT, STATIC) else {})


def tidy(text: str) -> str:
    """A text without what is another on each machine: folders and addresses."""
    text = re.sub(r"[^\s'\"(]*/site-packages/", "", text).replace(f"{ROOT}/", "")
    text = re.sub(r"/tmp/[\w./-]*?/(model[\w.]*)", r"\1", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text).strip()


def attempt(
    model: Model,
    form: str,
    static_too: bool = True,
    validate: bool = True,
    kept: Path | None = None,
) -> Outcome:
    """Tries a model with symbolic sizes, and where that goes wrong with fixed ones.

    Args:
        model: of the battery.
        form: one of `FORMATS`.
        static_too: try fixed sizes at all; those of other projects are not tried so.
        validate: let the exporter test what it wrote, as it does for users.
        kept: a folder for what jax gives and for the ONNX file, for the next format.
    """
    found = _tried(Subject(model, False, validate, kept), form)
    if found.outcome == RIGHT or not static_too or not model.symbols or form in OTHERS:
        return found
    try:
        fixed = _tried(Subject(model, True, validate, kept), form)
    except Exception as error:  # of jax alone, after the trial before
        return Outcome(RAW, f"jax fails after this: {type(error).__name__}: {error}", form)
    if fixed.outcome == RIGHT:
        found.symbolic, found.largest = found.outcome, fixed.largest
        found.outcome = found.outcome if found.outcome in BAD else STATIC
    return found


def _tried(subject: Subject, form: str) -> Outcome:
    expected = _kept(subject, form)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            served = FORMATS[form](subject, Path(folder) / "model")
        except Exception as error:
            found = _failed(error, form, time.perf_counter() - start)
            found.outcome = DEAD if subject.written else found.outcome
            return found
        seconds = time.perf_counter() - start
        found = _compared(subject, served, form, expected)
    found.seconds = round(seconds, 2)
    if served.report:
        found.validation = round(
            sum(v for k, v in served.report.seconds.items() if "valid" in k), 2
        )
    return found


def _kept(subject: Subject, form: str) -> list[Call]:
    if subject.kept is None:
        return _expected(subject, form)
    kind = "slopes" if form in GRADIENTS else "outputs"
    file = subject.kept / f"{subject.model.name}.{kind}.{subject.static}"
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")  # another process may read it at any time
        new.write_bytes(pickle.dumps(_expected(subject, form)))
        new.replace(file)
    return pickle.loads(file.read_bytes())


def _expected(subject: Subject, form: str) -> list[Call]:
    """The calls, each with what jax gives."""
    calls = subject.calls()
    if form in GRADIENTS:
        return [(kind, x, subject.slopes(x)) for kind, x in calls if kind.startswith("call")]
    found = [(kind, x, subject.expected(x)) for kind, x in calls if kind != "empty"]
    for kind, inputs in calls:
        if kind == "empty" and (nothing := subject.nothing(inputs)):
            found.append((kind, inputs, nothing))
    return found


def _failed(error: Exception, form: str, seconds: float) -> Outcome:
    text = str(error)
    first = f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind = RAW
    if form in OTHERS:
        kind = REFUSED if isinstance(error, NotImplementedError) else RAW
    elif isinstance(error, PaxError):
        kind = REFUSED if _is_clear(error) else UNCLEAR
        where = error.where or ""
    return Outcome(kind, first[:300], where[:300], text[:1500], round(seconds, 2))


def _is_clear(error: PaxError) -> bool:
    """Whether a refusal says what to look for: the operation, and the user's line."""
    if isinstance(error, ValidationError):
        return False
    if not isinstance(error, UnsupportedOperationError):
        return bool(error.where)
    return bool(_LINE.search(str(error.where))) and bool(re.search(r"\b[a-z]\w+", error.what))


def _compared(subject: Subject, served: Served, form: str, expected: Sequence) -> Outcome:
    largest = 0.0
    for name, serve in served.servers.items():
        asked = [each for each in expected if each[0] != "empty" or name == "load"]
        answers = iter(serve([inputs for _, inputs, _ in asked]))
        for kind, inputs, outputs in asked:
            where = f"{name}, {kind}: {', '.join(str(np.shape(x)) for x in inputs)}"
            try:
                found = next(answers)
            except PaxError as error:
                if kind == "empty":  # refused where something is left of nothing
                    continue
                if form in ELSEWHERE:
                    return _refused(error)
                return Outcome(DEAD, f"{type(error).__name__}: {error.what}", where, str(error))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                return Outcome(DEAD, text.splitlines()[0][:300], where, text[:1500])
            if fault := _fault(subject, found, outputs):
                return Outcome(WRONG, fault.replace("\n", " ")[:300], where, fault[:1500])
            largest = max(largest, *map(_distance, found, outputs), 0.0)
    return Outcome(RIGHT, largest=float(f"{largest:.1e}"))


def _refused(error: PaxError) -> Outcome:
    """What a runtime says of a model, that it refuses, or did not survive."""
    got = str(error.got)
    kind = REFUSED if "does not run" in error.what else DEAD
    lines = [line.strip() for line in got.splitlines() if line.strip()]
    marks = ("error: ", "Conversion is failed", "Check '")
    named = [line for mark in marks for line in lines if mark in line]
    return Outcome(kind, (named or lines or [error.what])[0], details=f"{error.what}\n{got}")


def _fault(subject: Subject, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> str:
    if len(found) != len(expected):
        return f"{len(found)} outputs instead of {len(expected)}"
    for index, (actual, right) in enumerate(zip(found, expected)):
        if np.asarray(actual).dtype != right.dtype:
            return f"output {index}: {np.asarray(actual).dtype} instead of {right.dtype}"
        try:
            assert_close(actual, right, subject.model.rtol, 1e-6, f"output {index}")
        except AssertionError as error:
            return str(error)
    return ""


def _distance(actual: np.ndarray, right: np.ndarray) -> float:
    """The largest difference in an output, as a part of its largest number or of 0.01."""
    wide = np.complex128 if right.dtype.kind == "c" else np.float64
    found, wanted = np.asarray(actual).astype(wide), right.astype(wide)
    finite = np.isfinite(wanted)
    apart = np.abs(found[finite] - wanted[finite]).max(initial=0.0)
    return float(apart / max(np.abs(wanted[finite]).max(initial=0.0), 1e-2))
