"""Leaves by dotted names, and comparison with the leaves on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from pax_export._foundations.errors import WeightNameError, WeightsMismatchError
from pax_export._foundations.files import html_text
from pax_export._foundations.types import PyTree
from pax_export.core import named_leaves

# The one name that a safetensors file keeps for itself.
RESERVED = "__metadata__"


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their dotted names, in tree order."""
    pairs = named_leaves(tree)
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        raise _shared_name(tree, [name for name, _ in pairs])
    for name in leaves.keys() & {"", RESERVED}:
        raise WeightNameError(
            "A weight has an empty or reserved name.",
            got=f"a leaf with the name {name!r}",
            write="a module, or a dict of arrays with other names",
        )
    return leaves


def _shared_name(tree: PyTree, names: list[str]) -> WeightNameError:
    name = next(name for name in names if names.count(name) > 1)
    items, _ = tree_flatten_with_path(tree)
    paths = [keystr(path) for (path, _), other in zip(items, names) if other == name]
    return WeightNameError(
        "Two weights have the same dotted name.",
        where=name,
        got=f"the paths {' and '.join(paths)}",
        write="dict keys without dots, or with other names",
    )


@dataclass(frozen=True)
class LoadReport:
    """The names that a file and a module have in common, and those that differ.

    Attributes:
        loaded: names of the arrays that were loaded.
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

    def _repr_html_(self) -> str:
        return html_text.report(str(self))


def compare_leaves(wanted: Mapping[str, object], there: Mapping[str, object]) -> LoadReport:
    """Compares the leaves of a module with those on disk: name -> shape and dtype."""
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


def mismatch_error(what: str, report: LoadReport, where: str, write: str) -> WeightsMismatchError:
    """Returns the error that lists all differences of a report and has it as `report`."""
    _, *lines = str(report).splitlines()
    listed = "\n".join(f"  - {line}" for line in lines)
    error = WeightsMismatchError(f"{what}:\n{listed}", where=where, write=write)
    error.report = report
    return error
