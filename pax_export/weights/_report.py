"""What is on disk, compared with what a module wants: one report of all differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pax_export._errors import WeightsMismatchError


@dataclass(frozen=True)
class LoadReport:
    """What was found on disk, and what of it a module has a place for.

    Attributes:
        loaded: names of the arrays that were taken from the file.
        missing: names that the module has and the file lacks.
        unexpected: names that the file has and the module lacks.
        mismatched: name -> what differs, for arrays of another shape or dtype.

    Example:
        >>> from pax_export.weights import LoadReport
        >>> report = LoadReport(("a",), ("b",), (), {"c": "float32[2] in the file, ..."})
        >>> report.complete
        False
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]

    @property
    def complete(self) -> bool:
        """True if the file has exactly the arrays of the module."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded"]
        lines += [f"missing from the file: {name}" for name in self.missing]
        lines += [f"unknown to the module: {name}" for name in self.unexpected]
        lines += [f"{name}: {difference}" for name, difference in self.mismatched.items()]
        return "\n".join(lines)


def compare(wanted: Mapping[str, object], there: Mapping[str, object]) -> LoadReport:
    """Compares descriptions of arrays, by name.

    Args:
        wanted: name -> shape and dtype of what a module has.
        there: name -> shape and dtype of what is on disk.  Equal descriptions
            fit; their texts stand in the report of those that do not.
    """
    loaded, missing, mismatched = [], [], {}
    for name, own in wanted.items():
        if name not in there:
            missing.append(name)
        elif there[name] == own:
            loaded.append(name)
        else:
            mismatched[name] = f"{there[name]} in the file, {own} in the module"
    unexpected = [name for name in there if name not in wanted]
    return LoadReport(tuple(loaded), tuple(missing), tuple(unexpected), mismatched)


def mismatch(what: str, report: LoadReport, where: str, write: str) -> WeightsMismatchError:
    """The error that lists all differences of a report, and holds it.

    Args:
        what: does not fit, without a period.
        report: at least one difference.
        where: the path on disk.
        write: what to write instead.
    """
    _, *lines = str(report).splitlines()
    listed = "\n".join(f"  - {line}" for line in lines)
    error = WeightsMismatchError(f"{what}:\n{listed}", where=where, write=write)
    error.report = report
    return error
