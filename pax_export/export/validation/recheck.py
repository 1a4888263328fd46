"""Validates an existing export against its report, in a fresh process without jax.

Results must have the reported names, shapes and dtypes and be finite, or equal the model's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pax_export._foundations.errors import InvalidArgumentError, ValidationError
from pax_export._foundations.optional import require
from pax_export.export.artifact import dimensions, formats, loading
from pax_export.export.artifact.dimensions import (
    ANY_RANK,
    UNKNOWN,
    RandomCall,
    RandomInput,
    name_of,
    numpy_dtype,
    random_calls,
)
from pax_export.export.artifact.report import ArrayInfo, SignatureInfo, read_report
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import count_not_finite, in_process

if TYPE_CHECKING:
    from pax_export.export.tracing.exportable import Model

#: How a runtime refuses a size that the constraints of an export forbid.
_REFUSED = re.compile("polymorphic shapes|dimension variable")
#: An input with more elements is not made: a report of others may ask for any number.
_MOST_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Check:
    signature: str
    sizes: dict[str, int]
    problem: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    largest_error: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        text = f"{self.signature} ({sizes})" if sizes else self.signature
        if self.problem:
            return f"{text}: FAILED: {' '.join(self.problem.split())}"
        errors = {name: f" off by {error:.1e}" for name, error in self.largest_error.items()}
        parts = [f"{name} {list(each)}{errors.get(name, '')}" for name, each in self.shapes.items()]
        found = "ok" if any(map(math.prod, self.shapes.values())) else "no element to compare"
        return f"{text}: {found}, {', '.join(parts)}"


class Rechecked:
    """Every signature of an export, called at several sizes.

    `model` is the exported model, to compare with; `methods` has the method of each signature, if
    its name differs (default: ``__call__`` for the default signature). Unless `trusted`, the export
    is checked before it runs, as in `load`.

    Attributes:
        report: the report of the export.
        format: its format.
        reference: the model to compare with; None without a model.
        answers: signature key, call, and the runtime's results for each call.
        checks: the results of the checks.
    """

    def __init__(
        self,
        path: Path,
        model: Model | None = None,
        methods: Mapping[str, str] | None = None,
        finite: bool = True,
        trusted: bool = False,
    ):
        self.report = report = read_report(path)
        format = formats.find(report.target)
        if format is None:
            raise InvalidArgumentError(
                "Exports for this target cannot be validated again.",
                where=str(path),
                got=report.target,
            )
        self.format = format
        loading.check(path, report, trusted)
        self.reference: Any = None
        if model is not None:
            require("jax", "all", "validate --against")
            make = formats.import_function("pax_export.export.validation.cases:ReferenceModel")
            self.reference = make(model, report, methods or {})
        calls = [
            (key, each)
            for key, info in report.signatures.items()
            for each in _make_calls(key, info)
        ]
        cases = [{"signature": key, "inputs": call.inputs} for key, call in calls]
        try:
            answers = in_process(format, path.absolute(), cases, "each")
        except RuntimeError as error:
            raise ValidationError(
                "The export cannot be run.", where=str(path), got=str(error)[-500:]
            ) from error
        self.answers = [
            (key, call, answer)
            for (key, call), answer in zip(calls, answers)
            if not _REFUSED.search(answer.get("error", ""))
        ]
        checks = [self._check(*each, finite) for each in self.answers]
        # Sizes that violate constraints are not failures if other sizes work: a preprocessor
        # chooses some of them.
        missing = report.signatures.keys() - {check.signature for check in checks}
        text = "no input was found that it takes"
        self.checks = checks + [Check(key, {}, text) for key in report.signatures if key in missing]

    def _check(self, key: str, call: RandomCall, answer: Mapping[str, Any], finite: bool) -> Check:
        got, info = answer.get("results", {}), self.report.signatures[key]
        try:
            expected = {each.name: (each.dtype, _shape(each, call.sizes)) for each in info.outputs}
        except _OF_NO_ARRAY as error:
            raise _no_array(key, info.outputs, error) from error
        problem = answer.get("error") or _find_problem(expected, got, info.assigns, finite)
        errors: dict[str, float] = {}
        if not problem and self.reference is not None:
            try:
                errors = self.reference.differences(key, call, info, got)
            except ValidationError as error:
                problem = f"{error.what} {error.where}: {error.got}"
        shapes = {name: got[name].shape for name in expected if name in got}
        return Check(key, call.sizes, problem, shapes, errors)


#: None if unknown.
Shape = tuple[int | None, ...] | None


def _make_calls(key: str, info: SignatureInfo) -> list[RandomCall]:
    try:
        inputs = {e.name: RandomInput(e.shape, numpy_dtype(e.dtype)) for e in info.inputs}
        unknown = (UNKNOWN, ANY_RANK)
        outputs = [tuple(n for n in e.shape if n not in unknown) for e in info.outputs]
        most = _MOST_ELEMENTS
        sizes = info.sizes or None
        return list(random_calls(inputs, info.constraints, sizes, most=most, outputs=outputs))
    except _OF_NO_ARRAY as error:
        raise _no_array(key, info.inputs, error) from error


#: Exceptions for arrays and shapes of an invalid report.
_OF_NO_ARRAY = (TypeError, ValueError, MemoryError, OverflowError)


def _no_array(key: str, arrays: Sequence[ArrayInfo], error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        "The signature has inputs or outputs that random arrays cannot represent.",
        where=key,
        got=f"{', '.join(map(str, arrays))}: {error}"[:500],
    )


def _shape(entry: ArrayInfo, sizes: Mapping[str, int]) -> Shape:
    """The shape of an output; a size is None if it depends on more than sizes of inputs."""

    def known(size: int | str) -> bool:
        return size != UNKNOWN and set(dimensions.names(size)) <= set(sizes)

    if ANY_RANK in entry.shape:
        return None
    return tuple(dimensions.value(each, sizes) if known(each) else None for each in entry.shape)


def _find_problem(
    expected: Mapping[str, tuple[str, Shape]], got: Arrays, assigns: Sequence[str], finite: bool
) -> str:
    values = {name: value for name, value in got.items() if not name.startswith("variable:")}
    changed = {name.removeprefix("variable:") for name in got} - set(values)
    if sorted(values) != sorted(expected):
        return f"it gives {sorted(values)} instead of {sorted(expected)}"
    if changed - set(assigns):
        return f"it changes {sorted(changed - set(assigns))}"
    for name, (dtype, shape) in expected.items():
        value = values[name]
        found = name_of(value.dtype)
        if found != dtype or not _shape_fits(value.shape, shape):
            return f"{name} is {found}{list(value.shape)} instead of {dtype}{_shape_text(shape)}"
        if finite and (count := count_not_finite(value)):
            return f"{name} has {count} of {value.size} elements that are not finite"
    return ""


def _shape_fits(found: tuple[int, ...], expected: Shape) -> bool:
    if expected is None:
        return True
    sizes = zip(found, expected)
    return len(found) == len(expected) and all(wanted in (None, size) for size, wanted in sizes)


def _shape_text(shape: Shape) -> str:
    if shape is None:
        return f"[{ANY_RANK}]"
    return f"[{', '.join(UNKNOWN if size is None else str(size) for size in shape)}]"
