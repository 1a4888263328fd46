"""Mends SavedModels that others wrote from jax, so that years of TensorFlow run them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pax_export._files import bytes_text
from pax_export.export.artifact import compatibility, inspect
from pax_export.export.artifact.report import package_versions
from pax_export.export.pipeline.export_run import ExportRun
from pax_export.export.retargeting import mend
from pax_export.export.retargeting.trial import ANY, Trial

#: The report, beside the mended model.
FILE = "pax_export_retarget.json"


@dataclass(frozen=True)
class RetargetReport:
    """What became of a SavedModel.

    Attributes:
        signatures: for each signature, how it was tested.
        modules: how many programs of jax were in it.
        changes: what was said in another way, and how often.
        oldest_tensorflow: the oldest release that runs it now, e.g. ``"2.15"``.
        stablehlo: the newest version of StableHLO that it needed, and needs now.
        calling_convention: likewise.
        module_bytes: the size of all programs, before and now.
        versions: of the packages that did it.
        validated: ``"process"``, ``"here"``, or ``None`` for not at all.
        largest_error: the largest absolute difference from the old model, by
            ``"signature: output"``; empty where TensorFlow could not run that.
        seconds: wall time by phase.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/old", pax.export.spec("batch, 3")
        ...     )
        ...     report = pax.export.retarget(folder + "/old", out=folder + "/new")
        >>> report.signatures
        {'serving_default': 'compared with the old one'}
        >>> report.calling_convention  # before, and now: there was nothing to do
        (8, 8)
    """

    signatures: dict[str, str]
    modules: int
    changes: dict[str, int]
    oldest_tensorflow: str
    stablehlo: tuple[str, str]
    calling_convention: tuple[int, int]
    module_bytes: tuple[int, int]
    versions: dict[str, str]
    validated: str | None
    largest_error: dict[str, float]
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, as it stands in ``pax_export_retarget.json``."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        before, after = zip(self.stablehlo, self.calling_convention, self.module_bytes)
        changes = [f"{count} × {what}" for what, count in self.changes.items() if count]
        lines = ["Mended SavedModel", *(f"  {key}: {how}" for key, how in self.signatures.items())]
        lines += [
            f"  programs    {self.modules}",
            f"  before      {_described(*before)}",
            f"  now         {_described(*after)}",
            "  changed     " + (", ".join(changes) or "versions and locations only"),
            f"  runs in     TensorFlow {self.oldest_tensorflow} and newer",
            "  mended by   " + ", ".join(f"{k} {v}" for k, v in self.versions.items()),
            "  seconds     " + ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items()),
        ]
        return "\n".join(lines)


def _described(stablehlo: str, convention: int, count: int) -> str:
    return f"StableHLO {stablehlo}, calling convention {convention}, {bytes_text(count)}"


def retarget(
    path: str | os.PathLike[str],
    consumer: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    validate: bool | Literal["process"] = True,
) -> RetargetReport:
    """Mends a SavedModel that jax2tf, orbax-export or Keras on jax wrote.

    Its programs are written anew, for the oldest TensorFlow that can be.
    Variables, assets and signatures stay as they are.

    Args:
        path: the directory of the SavedModel.
        consumer: the oldest TensorFlow that must run it, e.g.
            ``"tensorflow>=2.15"``; refused if the model needs a newer one.
        out: the directory to make; without it the model is replaced, which
            needs ``overwrite=True``.
        overwrite: replace what is there.
        validate: call every signature of the new model, with random inputs at
            two sizes, and compare results and gradients with the old one's
            where the installed TensorFlow can run that; ``"process"`` does it
            in fresh processes without jax.

    Returns:
        The report, which can be printed, and lies beside the model as
        ``pax_export_retarget.json``.

    Raises:
        ExportPathError: there is no SavedModel, or no program of jax in it; or
            it cannot be written to its place.
        UnsupportedOperationError: a program calls what only jax has (LAPACK).
        ConsumerError: it needs a newer TensorFlow than the consumer.
        ValidationError: the new model does not do what the old one does.
            Nothing is written after any of these.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/old", pax.export.spec("batch, 3")
        ...     )
        ...     report = pax.export.retarget(folder + "/old", out=folder + "/new")
        >>> report.modules, report.oldest_tensorflow
        (2, '2.15')
    """
    compatibility.requested(consumer)
    source, place = Path(path), Path(path if out is None else out)
    model = inspect.read_saved_model(
        source, "retarget"
    )  # before a place is asked for: there may be nothing to mend
    with ExportRun(ANY, place, validate=validate, overwrite=overwrite, phases=3) as run:
        with run.phase("mend"):
            modules = mend.mend(model, source)
            oldest = _check(consumer, modules)
        with run.place() as directory:
            with run.phase("write"):
                _write(source, directory, model)
            trial = Trial(model, validate == "process")
            run.tested(lambda: trial.run(source, directory) or {})
            report = _report(modules, oldest, trial, run)
            text = json.dumps(report.as_dict(), indent=1) + "\n"
            (directory / FILE).write_text(text, encoding="utf-8")
    return report


def _check(consumer: str | None, modules: Sequence[mend.Module]) -> compatibility.Version:
    needed = [
        compatibility.oldest_tensorflow(each.stablehlo[1], each.calling_convention[1])
        for each in modules
    ]
    for each, oldest in zip(modules, needed):
        compatibility.check(consumer, oldest, each.function)
    return max(needed)


def _write(source: Path, directory: Path, model: Any) -> None:
    # A fingerprint holds hashes of the file that is replaced.
    without = shutil.ignore_patterns(inspect.GRAPH_FILE, "fingerprint.pb", FILE)
    shutil.copytree(source, directory, ignore=without, dirs_exist_ok=True)
    (directory / inspect.GRAPH_FILE).write_bytes(model.SerializeToString(deterministic=True))


def _report(
    modules: Sequence[mend.Module],
    oldest: compatibility.Version,
    trial: Trial,
    run: ExportRun,
) -> RetargetReport:
    versions = [max(each.stablehlo[side] for each in modules) for side in (0, 1)]
    conventions = [max(each.calling_convention[side] for each in modules) for side in (0, 1)]
    sizes = [sum(each.bytes[side] for each in modules) for side in (0, 1)]
    changes: Counter[str] = Counter()
    for each in modules:
        changes.update(each.changes)
    return RetargetReport(
        signatures=trial.compared,
        modules=len(modules),
        changes=dict(changes),
        oldest_tensorflow=compatibility.text(oldest),
        stablehlo=(compatibility.text(versions[0]), compatibility.text(versions[1])),
        calling_convention=(conventions[0], conventions[1]),
        module_bytes=(sizes[0], sizes[1]),
        versions=package_versions("tensorflow"),
        validated=run.validated,
        largest_error=trial.largest_error,
        seconds=run.seconds,
    )
