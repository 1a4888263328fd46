"""Repairs third-party SavedModels with jax programs for older TensorFlow versions."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from pax_export._foundations import tables
from pax_export._foundations.errors import (
    ExportPathError,
    UnsupportedOperationError,
    ValidationError,
)
from pax_export._foundations.files import checksums
from pax_export._foundations.files.own_files import Belongs, now_in
from pax_export._foundations.files.system import as_path
from pax_export._foundations.optional import require
from pax_export._foundations.tables import bytes_text
from pax_export.export.artifact import saved_models
from pax_export.export.artifact.dimensions import RandomInput, random_calls
from pax_export.export.artifact.loading import check_saved_model, write_sums
from pax_export.export.artifact.own_exports import export_of_ours, saved_model_files
from pax_export.export.artifact.report import package_versions
from pax_export.export.artifact.screening import screen
from pax_export.export.formats.saved_model import SAVED_MODEL
from pax_export.export.formats.saved_model.run import FAILED
from pax_export.export.lowering.lower import CALLING_CONVENTION, XLA_EXPANDS, portable
from pax_export.export.pipeline.phases import ExportRun, check_validate
from pax_export.export.validation.validate import Case, call_export, compare_results

#: The report, next to the repaired model.
FILE = "pax_export_retarget.json"


@dataclass(frozen=True)
class RetargetReport:
    """The result of `retarget`.

    Attributes:
        signatures: how each signature was validated.
        modules: the number of jax programs in it.
        changes: the rewritten operations, with counts.
        oldest_tensorflow: the oldest release that runs it now, e.g. ``"2.15"``.
        stablehlo: the required version of StableHLO, before and now.
        calling_convention: the calling convention, before and now.
        module_bytes: the size of all programs, before and now.
        versions: the versions of the packages used.
        validated: ``"process"``, ``"here"``, or ``None`` for none.
        largest_error: the largest absolute difference from the old model, by
            ``"signature: output"``; empty if TensorFlow could not run that.
        seconds: wall time by phase.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/old", pax.export.spec("batch, 3"), operations="xla"
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
        """The report as plain data, as in ``pax_export_retarget.json``."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        before, after = zip(self.stablehlo, self.calling_convention, self.module_bytes)
        changes = [f"{count} × {what}" for what, count in self.changes.items() if count]
        lines = ["Mended SavedModel", *(f"  {key}: {how}" for key, how in self.signatures.items())]
        lines += [
            f"  programs    {self.modules}",
            f"  before      {_describe_module(*before)}",
            f"  now         {_describe_module(*after)}",
            "  changed     " + (", ".join(changes) or "versions and locations only"),
            f"  runs in     TensorFlow {self.oldest_tensorflow} and newer",
            "  mended by   " + ", ".join(f"{k} {v}" for k, v in self.versions.items()),
            "  seconds     " + ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items()),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return tables.report(str(self))


def _describe_module(stablehlo: str, convention: int, count: int) -> str:
    return f"StableHLO {stablehlo}, calling convention {convention}, {bytes_text(count)}"


def retarget(
    path: str | os.PathLike[str],
    consumer: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    validate: bool | Literal["process"] = True,
    trusted: bool = False,
) -> RetargetReport:
    """Rewrites a SavedModel of jax2tf, orbax-export or Keras on jax for older TensorFlow versions.

    Its programs are rewritten for the oldest possible TensorFlow; variables, assets and signatures
    are kept.

    Args:
        path: the directory of the SavedModel.
        consumer: the oldest TensorFlow that must run it, e.g. ``"tensorflow>=2.15"``;
            raises if the model needs a newer one.
        out: the new directory; without it the model is replaced, which requires
            ``overwrite=True``.
        overwrite: replace the model itself, an export of `pax_export`, or an earlier
            result of this function; nothing else is ever replaced.
        validate: call every signature of the new model with random inputs at two sizes, and compare
            results and gradients with the old model if the installed TensorFlow can run it;
            ``"process"`` uses fresh processes without jax.
        trusted: run a model with operations that are not allowed in untrusted ones; see `load`.

    Returns:
        The report, also written to ``pax_export_retarget.json`` in the model.

    Raises:
        ExportPathError: the path is not a SavedModel with a jax program, or the new
            one cannot be written.
        UnsupportedOperationError: a program calls a library of jax (LAPACK).
        UntrustedExportError: validation would run operations that are not allowed.
        ConsumerError: it needs a newer TensorFlow than the consumer.
        ValidationError: the new model differs from the old one.
            Nothing is written after any of these.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/old", pax.export.spec("batch, 3"), operations="xla"
        ...     )
        ...     report = pax.export.retarget(folder + "/old", out=folder + "/new")
        >>> report.modules, report.oldest_tensorflow
        (2, '2.15')
    """
    saved_models.parse_consumer(consumer)
    source = as_path(path)
    target = source if out is None else as_path(out, "out")
    # Before the path is checked: there may be nothing to repair.
    model = saved_models.read_saved_model(source, "retarget")
    check_saved_model(source, trusted=True)  # it is screened below, if it is run
    # In place, all files of the model are copied, including unknown ones.
    ours = now_in(source) if _same_path(source, target) else _mended_or_ours
    check_validate(validate, ANY)
    making = ExportRun(ANY, target, validate=validate, overwrite=overwrite, phases=3, ours=ours)
    with making as run:
        with run.phase("mend"):
            modules = mend(model, source)
            oldest = _check(consumer, modules)
            if validate and not trusted:
                screen(source)  # the test runs it
        with run.place() as directory:
            with run.phase("write"):
                _write_copy(source, directory, model)
            trial = Trial(model, validate == "process")
            run.tested(lambda: trial.run(source, directory) or {})
            report = _make_report(modules, oldest, trial, run)
            text = json.dumps(report.as_dict(), indent=1) + "\n"
            (directory / FILE).write_text(text, encoding="utf-8")
            if (directory / checksums.FILE).is_file():
                write_sums(directory)
    return report


def _same_path(source: Path, other: Path) -> bool:
    with suppress(OSError, ValueError):
        return source.samefile(other)
    return False


def _mended_or_ours(path: Path) -> Belongs | None:
    return saved_model_files(path) if (path / FILE).is_file() else export_of_ours(path)


def _check(consumer: str | None, modules: Sequence[RetargetedModule]) -> saved_models.Version:
    needed = [
        saved_models.oldest_tensorflow(each.stablehlo[1], each.calling_convention[1])
        for each in modules
    ]
    for each, oldest in zip(modules, needed):
        saved_models.check_consumer(consumer, oldest, each.function)
    return max(needed)


def _write_copy(source: Path, directory: Path, model: Any) -> None:
    # A fingerprint has hashes of the replaced file.
    without = shutil.ignore_patterns(saved_models.GRAPH_FILE, "fingerprint.pb", FILE)
    shutil.copytree(source, directory, ignore=without, dirs_exist_ok=True)
    (directory / saved_models.GRAPH_FILE).write_bytes(model.SerializeToString(deterministic=True))


def _make_report(
    modules: Sequence[RetargetedModule], oldest: saved_models.Version, trial: Trial, run: ExportRun
) -> RetargetReport:
    newest = [max(each.stablehlo[side] for each in modules) for side in (0, 1)]
    before, after = map(saved_models.format_version, newest)
    conventions = [max(each.calling_convention[side] for each in modules) for side in (0, 1)]
    sizes = [sum(each.bytes[side] for each in modules) for side in (0, 1)]
    changes: Counter[str] = Counter()
    for each in modules:
        changes.update(each.changes)
    return RetargetReport(
        signatures=trial.compared,
        modules=len(modules),
        changes=dict(changes),
        oldest_tensorflow=saved_models.format_version(oldest),
        stablehlo=(before, after),
        calling_convention=(conventions[0], conventions[1]),
        module_bytes=(sizes[0], sizes[1]),
        versions=package_versions("tensorflow"),
        validated=run.validated,
        largest_error=trial.largest_error,
        seconds=run.wall_time,
    )


_OPERATION = "XlaCallModule"
#: How jax2tf calls back into the graph of TensorFlow; with it go functions of the graph.
_CALLS_OF_TENSORFLOW = frozenset(("tf.call_tf_function",))
#: Calling conventions 9 and 10 are needed for these only.
_SHARDING, _TOKENS = b"sdy.", b"token"
#: First release with each attribute of XlaCallModule; older ones refuse unknown attributes.
_SHARDY = "use_shardy_partitioner"


@dataclass(frozen=True)
class RetargetedModule:
    """One operation before and after the rewrite."""

    function: str  # the TensorFlow function that contains it
    stablehlo: tuple[saved_models.Version, saved_models.Version]  # before, after
    calling_convention: tuple[int, int]
    bytes: tuple[int, int]
    changes: dict[str, int]


def mend(model: object, directory: Path) -> list[RetargetedModule]:
    mended = [_mend_operation(name, node) for name, node in _module_operations(model)]
    if not mended:
        raise ExportPathError(
            "The SavedModel contains no jax program.",
            where=str(directory),
            got=f"no operation {_OPERATION}",
            write="a SavedModel that jax2tf, orbax-export, Keras on jax, or pax_export wrote",
        )
    return mended


def _module_operations(model: Any) -> Iterator[tuple[str, Any]]:
    """Each operation that calls a module, with the name of its function."""
    for graph in model.meta_graphs:
        yield from (("graph", node) for node in graph.graph_def.node if node.op == _OPERATION)
        for function in graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == _OPERATION:
                    yield function.signature.name, node


def _mend_operation(function: str, node: Any) -> RetargetedModule:
    old, convention = node.attr["module"].s, node.attr["version"].i
    # To read a missing attribute would add it, without a value, and no session loads such a graph.
    calls_tensorflow = "function_list" in node.attr and node.attr["function_list"].list.func
    allowed = XLA_EXPANDS | (_CALLS_OF_TENSORFLOW if calls_tensorflow else frozenset())
    changes: Counter[str] = Counter()
    try:
        new = portable(old, allowed, changes=changes, single=True)
    except UnsupportedOperationError as error:
        raise UnsupportedOperationError(
            error.what,
            where=", ".join(filter(None, (function, error.where))),
            got=error.got,
            # Only calls of libraries have a place.
            write="pax_export.export.to_saved_model, which writes linear algebra without LAPACK, "
            "on the model itself"
            if error.where
            else error.write,
        ) from error
    version = saved_models.stablehlo_version(old)
    node.attr["module"].s = new.module
    needed = convention
    if _SHARDING not in new.module and _TOKENS not in new.module:
        # An older format has other fields; it is read unchanged.
        needed = min(convention, CALLING_CONVENTION)
    node.attr["version"].i = needed
    if needed < 10 and _SHARDY in node.attr:
        changes[f"attribute {_SHARDY}"] += node.attr[_SHARDY].b
        del node.attr[_SHARDY]
    return RetargetedModule(
        function,
        (tuple(map(int, version.split("."))) if version else (), new.stablehlo),
        (convention, needed),
        (len(old), len(new.module)),
        dict(changes),
    )


#: Sizes of all dimensions that a signature leaves open; the later ones are for
#: signatures that do not take both of the first.
_SIZES, _OTHER_SIZES = (2, 5), (1, 4, 8, 16, 32, 128)
#: Calls that fail stop no others: the contents of the model are unknown.
ANY = dataclasses.replace(
    SAVED_MODEL, run="pax_export.export.formats.saved_model.run:run_any", has_variables=False
)
_OPEN = "open"


class Trial:
    """Results of running the signatures of the `old` and the `new` model.

    Valid symbolic sizes are unknown, and the installed TensorFlow often cannot run the old model:
    so sizes are tried, and without results to compare, the new model is only run.
    """

    def __init__(self, model: object, separate: bool):
        self._signatures = _signature_inputs(model)
        self._separate = separate
        self.compared: dict[str, str] = {}
        self.largest_error: dict[str, float] = {}

    def run(self, old: Path, new: Path) -> None:
        tried = self._call_both(old, new, list(self._signatures), _SIZES)
        stopped = {each[0].signature for each in tried if FAILED in each[2]}
        tried += self._call_both(old, new, stopped, _OTHER_SIZES) if stopped else []
        for key, inputs in self._signatures.items():
            if inputs is None:
                self.compared[key] = "not run: no random input can be made for it"
            else:
                self._judge_signature(key, [each for each in tried if each[0].signature == key])

    def _call_both(
        self, old: Path, new: Path, keys: Iterable[str], sizes: Sequence[int]
    ) -> list[tuple[Case, Any, Any]]:
        """Calls of these signatures, with the results of either model."""
        cases = [case for key in sorted(keys) for case in _cases(key, self._signatures[key], sizes)]
        results = (call_export(ANY, path, cases, self._separate) for path in (old, new))
        return list(zip(cases, *results))

    def _judge_signature(self, key: str, tried: list[tuple[Case, Any, Any]]) -> None:
        ran = [each for each in tried if FAILED not in each[2]][: len(_SIZES)]
        lost = [each for each in tried if FAILED in each[2] and FAILED not in each[1]]
        if lost or not ran:
            failed = (lost or tried)[0][2][FAILED]
            raise ValidationError(
                "The rewritten model cannot be called.",
                where=f"{key} {(lost or tried)[0][0].label}",
                got=failed.tobytes().decode(errors="replace")[-1500:],
            )
        comparable = [each for each in ran if FAILED not in each[1]]
        for case, before, after in comparable:
            case.expected = dict(before)
            for name, difference in compare_results(case, after).items():
                name = f"{key}: {name}"
                self.largest_error[name] = max(difference, self.largest_error.get(name, 0.0))
        self.compared[key] = (
            "compared with the old one"
            if comparable
            else "run; the installed TensorFlow cannot run the old one"
        )


def _signature_inputs(model: Any) -> dict[str, dict[str, RandomInput] | None]:
    """The inputs of each signature; None where one is not an array."""
    tf = require("tensorflow", "tensorflow", "retarget")
    return {
        key: _random_inputs(tf, signature.inputs)
        for graph in model.meta_graphs
        for key, signature in sorted(graph.signature_def.items())
        if key != saved_models.INITIALIZER
    }


def _random_inputs(tf: ModuleType, inputs: Mapping[str, Any]) -> dict[str, RandomInput] | None:
    found = {}
    for name, info in inputs.items():
        try:
            dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)
        except TypeError:
            return None
        if info.tensor_shape.unknown_rank or dtype == np.dtype(object):
            return None
        sizes = (dimension.size for dimension in info.tensor_shape.dim)
        found[name] = RandomInput(tuple(_OPEN if size < 0 else size for size in sizes), dtype)
    return found


def _cases(key: str, inputs: Mapping[str, RandomInput] | None, tried: Sequence[int]) -> list[Case]:
    if inputs is None:
        return []
    is_open = any(_OPEN in each.shape for each in inputs.values())
    sizes = [{_OPEN: size} for size in (tried if is_open else tried[:1])]
    labels = [f"({each[_OPEN]} for every open size)" if is_open else "" for each in sizes]
    calls = zip(random_calls(inputs, sizes=sizes), labels)
    return [Case(key, each.inputs, {}, label=label) for each, label in calls]
