"""Report fields of StableHLO bundles."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pax_export._foundations.errors import ExportPathError
from pax_export.export.artifact import structure
from pax_export.export.artifact.report import Report, SignatureInfo

WEIGHT, INPUT, OUTPUT = "weight", "input", "output"

Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FunctionDetails:
    """One function: its file, its flat operands and results, and those that its modules keep."""

    file: str
    operands: Names
    results: Names
    kept: tuple[tuple[int, ...], ...] = ()
    neutral: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Details:
    vjp_order: int
    weights: Literal["arguments", "constants"]
    functions: dict[str, FunctionDetails]


def details_of(report: Report) -> Details:
    """The details of a report; an ExportPathError if they are not those of its signatures."""
    known = {each.name for each in fields(Details)}
    given = {name: value for name, value in report.details.items() if name in known}
    try:
        found: Details = structure.read(Details, _as_json(given), "details")
        if found.vjp_order < 0:
            raise ValueError("details.vjp_order is less than zero")
        if set(found.functions) != set(report.signatures):
            raise ValueError("details.functions are not those of the signatures")
        weights = [each.name for each in report.variables]
        for key, each in found.functions.items():
            _check(each, report.signatures[key], weights, f"details.functions.{key}")
        return found
    except ValueError as error:
        raise ExportPathError(
            "The report of this export cannot be read.", where=report.model, got=repr(error)[:500]
        ) from error


def _check(function: FunctionDetails, info: SignatureInfo, weights: list[str], where: str) -> None:
    allowed = {
        "operands": {WEIGHT: weights, INPUT: [each.name for each in info.inputs]},
        "results": {WEIGHT: list(info.assigns), OUTPUT: [each.name for each in info.outputs]},
    }
    for what, names in allowed.items():
        given: Names = getattr(function, what)
        wrong = [name for kind, name in given if name not in names.get(kind, ())]
        if wrong or len(set(given)) != len(given):
            raise ValueError(f"{where}.{what} have unknown or repeated names")
        # Weights that a function does not read are none of its operands; all else is.
        needed = {(kind, name) for kind in names if kind != WEIGHT for name in names[kind]}
        if not needed <= set(given):
            raise ValueError(f"{where}.{what} lack an input or output")
    if not set(info.assigns) <= set(weights):
        raise ValueError(f"{where} assigns an unknown weight")
    if not function.file or function.file.startswith(".") or {"/", "\\"} & set(function.file):
        raise ValueError(f"{where}.file is not a file name")


def _as_json(value: object) -> object:
    """Converts tuples to lists, as in JSON, so that new and stored reports compare equal."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value
