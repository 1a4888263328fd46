"""What every format does alike: check, load, trace, lower, write, test, report, and take the place.

A format says its own part in a `Writer`; `run_export` calls it phase by phase.  Nothing stands
at the path before the end, and nothing is left where a phase fails.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pax_export._errors import (
    GradientMismatchError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    MissingPackageError,
    ValidationError,
    a_few,
)
from pax_export._files import card_file, replacing, signature_file, single_file
from pax_export._files import directory as _directory
from pax_export._optional import require
from pax_export._signing import signer
from pax_export.core import Module, labelled, named_modules
from pax_export.export.artifact.card import write_card
from pax_export.export.artifact.dtypes import is_inexact
from pax_export.export.artifact.formats import Format, imported
from pax_export.export.artifact.ours import export_of_ours
from pax_export.export.artifact.report import Report, Validated, VariableInfo, write_report
from pax_export.export.pipeline.parting import Parting, named, parting
from pax_export.export.tracing.exportable import Exportable, exportable
from pax_export.export.tracing.programs import Program, trace_all
from pax_export.export.validation.budget import SPARE, Budget
from pax_export.export.validation.validate import Case, validate

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
#: So many weights are named.
_FEW = 8
#: A save that is done within so many seconds is silent.
PATIENCE = 1.0


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


class Writer(ABC):
    """What one format does in the phases of an export; made for one export.

    Attributes:
        format: its row in the table of formats.
        loads: the package that is loaded once the model has been lowered, as the user is told
            of it; empty for none.
        factor: how much more than rounding its results may differ from jax's.
        tests_reported: whether a test needs the report beside what was written.
        one_by_one: whether the format's `run` asks for one call after the other.
        budget: what a test may cost, once it has begun.
        name: of the model.
        variables: the stored arrays, for the report.
    """

    format: ClassVar[Format]
    loads: ClassVar[str] = ""
    factor: float = 1.0
    tests_reported: ClassVar[bool] = False
    one_by_one: ClassVar[bool] = False
    budget: Budget = Budget()
    name: str
    variables: Sequence[VariableInfo]

    def find(self, request: Request) -> None:  # noqa: B027  most formats load nothing
        """Finds the packages that `load` loads, before any work is done."""

    def load(self, request: Request) -> None:  # noqa: B027
        """Loads packages, which takes longer than to find out that a model is to be refused."""

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
        here = imported(self.format.run) if self.one_by_one else None
        return validate(self.format, place, self.cases(), run.separate, self.factor, here)

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
    run = ExportRun(
        writer.format,
        request.path,
        validate=request.validate,
        overwrite=request.overwrite,
        phases=5 if writer.loads else 4,
        sign=request.sign,
        card=request.card,
    )
    with run:
        writer.find(request)
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


def _tested(writer: Writer, place: Path, run: ExportRun, request: Request) -> dict[str, float]:
    """Tests what was written, and once more without what failed and nobody asked for."""
    try:
        return run.tested(lambda: _test(writer, place, run))
    except ValidationError as error:
        if not writer.gives_up(error):
            _name(error, writer, run, request)
            raise
    with run.phase("write"):
        for each in place.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        writer.write(place)
    try:
        return run.tested(lambda: _test(writer, place, run))
    except ValidationError as error:
        _name(error, writer, run, request)
        raise


def _name(error: ValidationError, writer: Writer, run: ExportRun, request: Request) -> None:
    """Adds to an error where jax and the export part, for results that differ."""
    part = writer.for_part()
    if part is None or isinstance(error, GradientMismatchError) or not_finite(writer.stored()):
        return  # weights that are no numbers are a reason, and no operation is to blame
    model, kinds = request.model, {}
    if isinstance(model, Module):
        kinds = {path: type(each).__name__ for path, each in named_modules(model)}
        model = labelled(model)

    def test(model: Exportable, program: Program, place: Path) -> None:
        copied = copy.copy(part)
        copied.budget = Budget()
        copied.lower(model, (program,))
        copied.write(place)
        copied.test(place, run)

    def find() -> Parting | None:
        run.budget = Budget()
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
    return Report(
        model=writer.name,
        variables=tuple(writer.variables),
        variable_bytes=sum(each.bytes for each in writer.variables),
        validated=run.validated,
        left_out=tuple(run.budget.left_out),
        largest_error=errors,
        seconds=run.wall_time,
        target=writer.format.name,
        **{**facts, **writer.facts(place)},
    )


class Progress:
    """The phases of one save, how long each takes, and what the user sees of them on stderr.

    That is nothing at first, and a line of progress after a second: with rich installed, and a
    terminal, one that lives; otherwise one for each phase.
    """

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
    def __init__(self, total: int):
        self._total = total

    def show(self, name: str, done: int) -> None:
        total = max(self._total, done + 1)
        print(f"pax_export: {name} ({done + 1}/{total})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _Bar:
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

    It has one phase less without a test.  With `overwrite`, it replaces what is recognised as
    `ours`.  With the path of a private key, what it writes is signed.  What has no report has no
    card.
    """

    def __init__(
        self,
        format: Format,
        path: str | os.PathLike[str],
        *,
        validate: Any,
        overwrite: bool,
        phases: int,
        ours: replacing.Recognize = export_of_ours,
        sign: Any = None,
        card: Any = False,
    ):
        more = ("variables",) if format.has_variables else ()
        ways = (True, False, "full", "process", *more)
        check_choice("validate", validate, ways)
        self.path = _directory.place(path)
        if format.plain_path:
            _directory.check_plain(self.path)
        self._ours = ours if overwrite else None
        self._validate = validate
        #: What the test may cost, once it has begun, and what it left out.
        self.budget = Budget()
        super().__init__(phases if validate else phases - 1)
        self._writing = single_file if format.suffix else _directory
        self._writing.check(self.path, self._ours)
        self._card, self._drawing = _card(card)
        if self._card and format.suffix:
            card_file.check(self.path)
        self._signer = signer(sign, "an export")
        if self._signer and format.suffix:
            beside = signature_file.of_file(self.path)
            single_file.check(beside, signature_file.recognized if overwrite else None)

    def place(self, needed: int = 0) -> AbstractContextManager[Path]:
        """A place for about so many bytes, which takes that of the path when the block is done."""
        return self._writing.replaced(self.path, self._ours, needed)

    def write_card(self, report: Report, place: Path) -> None:
        """Writes the page for people, if the user wants it, into a folder or beside a file."""
        if self._card:
            of = card_file.of_folder if place.is_dir() else card_file.of_file
            write_card(report, place, of(place), self._drawing)

    def clear(self) -> None:
        """Removes the card of the file that was replaced, if the new one has none."""
        if not self._card and self._writing is single_file:
            card_file.remove(self.path)

    def sign(self, place: Path) -> None:
        """Signs what lies at a place, if the user wants it: nothing of it may change afterwards."""
        if self._signer and place.is_dir():
            self._signer.sign_folder(place, self.path.name)
        elif self._signer:
            self._signer.sign_file(place)

    def tested(self, test: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Tests what was written, if the user wants it; gives the largest error of each output."""
        if not self._validate:
            return {}
        before = sum(self.seconds.values()) + SPARE
        self.budget = Budget(before if self._validate is True else None)
        with self.phase("validate"):
            return test()

    @property
    def separate(self) -> bool:
        return self._validate == "process"

    @property
    def validated(self) -> Validated:
        """How the export was tested, as the report says it."""
        ways: dict[Any, Validated] = {True: "here", "full": "here", False: None}
        return ways.get(self._validate, self._validate)

    @property
    def calls(self) -> bool:
        """Whether the test makes calls, which needs the whole model in memory."""
        return self._validate in (True, "full", "process")

    @property
    def wall_time(self) -> dict[str, float]:
        """Seconds by phase, as the report says them."""
        return {name: round(value, 4) for name, value in self.seconds.items()}


def _card(card: Any) -> tuple[bool, str]:
    """Whether there is a card, and the drawing in it."""
    if isinstance(card, bool):
        return card, ""
    if hasattr(card, "to_svg"):
        return True, card.to_svg()
    raise InvalidArgumentTypeError(
        "card says whether a page for people is written, or brings the drawing on it.",
        got=f"card={card!r:.80}",
        write="card=False, or card=pax.inspection.draw(net, inputs)",
    )


def checked_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
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
    named = several or len(keys) > 1
    if isinstance(value, Mapping) and set(value) <= set(keys) and named:
        return dict(value)
    if not several:
        return {keys[0]: value}
    raise InvalidArgumentError(
        "With several signatures, this is given for some or all of them.",
        where=name,
        got=sorted(value) if isinstance(value, Mapping) else type(value).__name__,
        write=f"{name}={{{keys[0]!r}: ...}}",
    )
