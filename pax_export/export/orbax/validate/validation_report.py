"""Differences between a candidate and its baseline, with tolerances for floats.

Shapes and dtypes must be equal, but for 64-bit numbers that jax narrows to 32 bits.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, NegativeToleranceError
from pax_export._optional import require
from pax_export._types import PyTree
from pax_export.core import path_name
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.orbax.validate.validation_job import ValidationSingleJobResult
from pax_export.export.orbax.validate.validation_utils import (
    Jsonable,
    Status,
    get_latency_stat,
    is_floating,
)
from pax_export.export.validation.validate import far_apart, widen

_logger = logging.getLogger(__name__)
_SMALLEST = 1e-6  # relative errors of less than this are those of this


@dataclass
class ValidationReportOption(Jsonable):
    """Tolerances and output of a validation.

    Args:
        floating_atol: absolute tolerance of floating-point outputs ...
        floating_rtol: ... and tolerance relative to the baseline.
        max_non_floating_mismatch_ratio: the share of other arrays that may differ.
        output_report_path: where to write the report as JSON.
        print_debug_info: log all values of a failure.

    Raises:
        NegativeToleranceError: a tolerance is negative.

    Example:
        >>> ValidationReportOption(floating_atol=1e-5).floating_rtol
        1e-07
    """

    floating_atol: float = 1e-7
    floating_rtol: float = 1e-7
    max_non_floating_mismatch_ratio: float = 1e-2
    output_report_path: str | pathlib.Path | None = None
    print_debug_info: bool = False

    def __post_init__(self):
        for name in ("floating_atol", "floating_rtol"):
            if getattr(self, name) < 0:
                raise NegativeToleranceError(
                    f"{name} should be larger than zero.", got=str(getattr(self, name))
                )


@dataclass
class LatencyStat(Jsonable):
    """The latencies of the batches, in ms."""

    num_batches: int
    avg_in_ms: float
    p90_in_ms: float
    p99_in_ms: float


@dataclass
class FloatingPointDiffReport(Jsonable):
    """The differences of all floating-point numbers."""

    total: int
    max_diff: float
    max_rel_diff: float
    all_close: bool
    all_close_absolute_tolerance: float
    all_close_relative_tolerance: float


@dataclass
class NonFloatingPointDiffReport(Jsonable):
    """The number of other arrays that differ, in at least one element."""

    total_flattened_tensors: int
    mismatches: int
    mismatch_ratio: float
    max_non_floating_mismatch_ratio: float


@dataclass
class OutputDiff(Jsonable):
    """The comparison of one output of one batch."""

    name: str
    kind: str  # dtype and shape of the baseline
    max_diff: float
    max_rel_diff: float
    reason: str  # why it does not pass; empty if it does


@dataclass(init=False, eq=False)
class ValidationReport(Jsonable):
    """The comparison of a candidate with its baseline.

    Args:
        baseline: the reference.
        candidate: the result to compare with it.
        option: the tolerances.

    Raises:
        InvalidArgumentError: outputs have different structures or numbers of elements.

    Example:
        >>> from pax_export.export.orbax.validate.validation_job import ValidationSingleJobResult
        >>> def result(value):
        ...     return ValidationSingleJobResult([0.1], [{"y": np.array(value)}], "N/A", {})
        >>> ValidationReport(result([1, 2, 3, 4]), result([1, 0, 0, 0])).status.name
        'Fail'
    """

    outputs: dict[str, FloatingPointDiffReport | NonFloatingPointDiffReport]
    latency: dict[str, LatencyStat]
    xprof_url: dict[str, str]
    metadata: dict[str, Any]
    status: Any
    differences: list[OutputDiff] = field(default_factory=list)

    def __init__(
        self,
        baseline: ValidationSingleJobResult,
        candidate: ValidationSingleJobResult,
        option: ValidationReportOption | None = None,
    ):
        self._option = option or ValidationReportOption()
        results = {"baseline": baseline, "candidate": candidate}
        self.latency = {
            name: LatencyStat(*get_latency_stat(each.latencies)) for name, each in results.items()
        }
        self.latencies = {name: list(each.latencies) for name, each in results.items()}
        self.xprof_url = {name: each.xprof_url for name, each in results.items()}
        self.metadata = {name: each.metadata for name, each in results.items()}
        pairs = _pair_outputs(baseline.outputs, candidate.outputs)
        compared = [_compare_outputs(*pair, self._option) for pair in pairs]
        self.differences = [each for each, _ in compared]
        passes = self._sum_up(compared)
        self.status = Status.Pass if passes else Status.Fail
        self._log_report(pairs)

    def _sum_up(self, compared: list[tuple[OutputDiff, int | None]]) -> bool:
        """Sets the two reports of all outputs; returns whether they pass."""
        option = self._option
        floats = [(each, size) for each, size in compared if size is not None]
        others = [each for each, size in compared if size is None]
        mismatches = sum(bool(each.reason) for each in others)
        ratio = mismatches / len(others) if others else 0.0
        wrong = any(each.reason for each, _ in floats)
        self.outputs = {}
        if floats:
            self.outputs["FloatingPointDiffReport"] = FloatingPointDiffReport(
                total=sum(size for _, size in floats),
                max_diff=max(each.max_diff for each, _ in floats),
                max_rel_diff=max(each.max_rel_diff for each, _ in floats),
                all_close=not wrong,
                all_close_absolute_tolerance=option.floating_atol,
                all_close_relative_tolerance=option.floating_rtol,
            )
        self.outputs["NonFloatingPointDiffReport"] = NonFloatingPointDiffReport(
            total_flattened_tensors=len(others),
            mismatches=mismatches,
            mismatch_ratio=ratio,
            max_non_floating_mismatch_ratio=option.max_non_floating_mismatch_ratio,
        )
        other_kind = any(each.reason.startswith(_OTHER_KIND) for each in self.differences)
        return not (wrong or other_kind or ratio > option.max_non_floating_mismatch_ratio)

    def _log_report(self, pairs: list[tuple[str, Any, Any]]) -> None:
        if self.status is Status.Fail:
            _logger.warning("%s", self)
            if self._option.print_debug_info:
                for name, expected, got in pairs:
                    _logger.warning("%s: baseline %s, candidate %s", name, expected, got)
        if self._option.output_report_path is not None:
            path = pathlib.Path(self._option.output_report_path)
            path.write_text(self.to_json(indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{self.status.name}: candidate against baseline"]
        for name, stat in self.latency.items():
            lines.append(
                f"  {name}: {stat.num_batches} batches, {stat.avg_in_ms:.3f} ms on average, "
                f"{stat.p90_in_ms:.3f} ms (90 %), {stat.p99_in_ms:.3f} ms (99 %)"
            )
        for each in self.differences:
            verdict = each.reason or "passes"
            lines.append(f"  {each.name} {each.kind}: {verdict}, error {each.max_diff:.3g}")
        return "\n".join(lines)

    def to_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the latency of each batch and the error of each output.

        Args:
            path: the file to write; its suffix chooses the format.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        require("matplotlib", "examples", "a picture of a validation")
        # Drawn without pyplot, which keeps state and may want a screen.
        figure = require("matplotlib.figure", "examples", "a picture of a validation").Figure(
            figsize=(10, 4), layout="constrained"
        )
        left, right = figure.subplots(1, 2)
        for name, seconds in self.latencies.items():
            left.plot([1000 * each for each in seconds], marker="o", label=name)
        left.set(xlabel="batch", ylabel="latency [ms]", ylim=(0, None))
        left.legend()
        right.barh(
            [each.name for each in self.differences],
            [min(each.max_diff, 1e30) for each in self.differences],
            color=["tab:red" if each.reason else "tab:green" for each in self.differences],
        )
        right.set(xlabel="largest error")
        right.set_xscale("symlog", linthresh=1e-9)
        figure.suptitle(self.status.name)
        figure.savefig(os.fspath(path))


_OTHER_KIND = "another shape or dtype"


def _pair_outputs(baseline: object, candidate: object) -> list[tuple[str, Any, Any]]:
    """The name, the expected and the got value of each output of each batch."""

    def plain(outputs: PyTree) -> list[Any]:
        return [dict(each) if isinstance(each, Mapping) else each for each in outputs]

    paths, tree = jax.tree_util.tree_flatten_with_path(plain(baseline))
    others, other_tree = jax.tree_util.tree_flatten(plain(candidate))
    if tree != other_tree:
        raise InvalidArgumentError(
            "baseline and candidate result have diff tree_def.",
            got=f"baseline tree_def = {tree}, candidate tree_def = {other_tree}",
        )
    pairs = [(path_name(path), value, other) for (path, value), other in zip(paths, others)]
    for which, wanted in (("floating", True), ("non-floating", False)):
        counts = [
            sum(np.asarray(v).size for v in values if is_floating(v) is wanted)
            for values in ([value for _, value, _ in pairs], others)
        ]
        if counts[0] != counts[1]:
            raise InvalidArgumentError(
                f"baseline and candidate {which} result have different length.",
                got=f"baseline = {counts[0]}, candidate = {counts[1]}",
            )
    return pairs


def _compare_outputs(
    name: str, expected: PyTree, got: PyTree, option: ValidationReportOption
) -> tuple[OutputDiff, int | None]:
    """Compares one output; returns its size, too, if it is compared with a tolerance."""
    one, other = (x.numpy() if isinstance(x, tf.Tensor) else np.asarray(x) for x in (expected, got))
    one, other = _match_width(one, other)
    floating = is_floating(expected)
    size = one.size if floating else None
    kind = f"{one.dtype}{list(one.shape)}"
    # Strings have one dtype here: numpy's includes their maximum length.
    dtypes = [x.dtype.kind if x.dtype.kind in "OSU" else x.dtype for x in (one, other)]
    if one.shape != other.shape or dtypes[0] != dtypes[1]:
        # Python numbers have the dtype that each requires.
        if one.shape or other.shape or one.dtype.kind != other.dtype.kind:
            reason = f"{_OTHER_KIND}: {other.dtype}{list(other.shape)}"
            return OutputDiff(name, kind, float("inf"), float("inf"), reason), size
    if not floating:
        wrong = int(np.sum(one != other))
        reason = f"{wrong} of {one.size} elements differ" if wrong else ""
        return OutputDiff(name, kind, float(bool(wrong)), float(bool(wrong)), reason), size
    return _compare_floating(name, kind, widen(one).ravel(), widen(other).ravel(), option), size


def _match_width(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Narrows 64-bit numbers to the 32 bits of jax if nothing else differs and integers fit."""
    if one.dtype == other.dtype or not {one.dtype.kind, other.dtype.kind} <= set("iufc"):
        return one, other
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(one.dtype))
    if narrow != jax.dtypes.canonicalize_dtype(other.dtype):
        return one, other
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = one.astype(narrow), other.astype(narrow)
    lost = [narrow.kind in "iu" and np.any(new != old) for new, old in zip(narrowed, (one, other))]
    return (one, other) if any(lost) else narrowed


def _compare_floating(
    name: str, kind: str, one: np.ndarray, other: np.ndarray, option: ValidationReportOption
) -> OutputDiff:
    wrong, apart = far_apart(one, other, option.floating_rtol, 0.0, option.floating_atol)
    apart = np.where(np.isnan(apart), np.inf, apart)
    size = np.where(np.isfinite(one), np.abs(one), 0.0)
    relative = apart / np.maximum(size, _SMALLEST)
    reason = f"{int(wrong.sum())} of {wrong.size} elements differ" if wrong.any() else ""
    absolute, relative = (float(np.max(values, initial=0.0)) for values in (apart, relative))
    return OutputDiff(name, kind, absolute, relative, reason)
