"""The report of an adoption: one row per leaf, and unused arrays."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pax_export._foundations import tables
from pax_export._foundations.errors import a_few


@dataclass(frozen=True)
class Row:
    """One leaf of the module, and the arrays that fill it.

    Attributes:
        leaf: its path.
        arrays: the names of the arrays in the source.
        how: the conversion, such as ``"transposed"``; empty for none.
        why: the reason for the match.
        shape: of the leaf.
        dtype: of the leaf.

    Example:
        >>> import numpy as np, pax_export as pax
        >>> file = {"fc.weight": np.ones((3, 2)), "fc.bias": np.ones(3)}
        >>> _, report = pax.weights.adopt(pax.Linear(2, 3), file)
        >>> report.rows[0].arrays, report.rows[0].how
        (('fc.weight',), 'transposed')
    """

    leaf: str
    arrays: tuple[str, ...]
    how: str
    why: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AdoptionReport:
    """The result of `adopt`; prints as a table.

    Attributes:
        where: the source.
        kind: its format.
        origin: the framework whose conventions its arrays follow.
        rows: one `Row` for each leaf that was filled.
        counters: leaves that count batches of statistics, set to 1.
        kept: leaves with unchanged values, by ``keep=`` or because files do not store them.
        ignored: arrays of the source that were left out.
        constants: arrays that are not weights: graph constants, optimizer state.
        tied: arrays of the source that repeat others -> these.
        zeros: leaves set to zeros by ``zeros=``.
        tried: the number of assignments that were compared with ``reference=``.

    Example:
        >>> import numpy as np, pax_export as pax
        >>> file = {"fc.weight": np.ones((3, 2)), "fc.bias": np.ones(3)}
        >>> net, report = pax.weights.adopt(pax.Linear(2, 3), file)
        >>> print(report)
        2 leaves from 2 arrays of the dict that was given (mapping, as torch keeps them)
          weight  float32[2,3]  <- fc.weight  transposed  (the only one that fits)
          bias    float32[3]    <- fc.bias                (the only one that fits)
    """

    where: str
    kind: str
    origin: str
    rows: tuple[Row, ...]
    counters: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    tried: int = 0
    zeros: tuple[str, ...] = ()
    _choice: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and texts, as JSON can keep it."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return json.loads(json.dumps(found, default=asdict))

    def __str__(self) -> str:
        columns = [column for column in zip(*self._cells()) if any(column)]
        lines = [f"  {line}" for line in tables.aligned(zip(*columns))]
        return "\n".join([self._title(), *lines, *self._rest()])

    def _repr_html_(self) -> str:
        table = tables.grid(("leaf", "", "arrays", "how", "why"), self._cells())
        return tables.block(self._title(), table, tables.lines(self._rest()))

    def _title(self) -> str:
        arrays = {name for row in self.rows for name in row.arrays}
        return (
            f"{len(self.rows)} leaves from {len(arrays)} arrays of {self.where} "
            f"({self.kind}, as {self.origin} keeps them)"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (row.leaf, f"{row.dtype}[{','.join(map(str, row.shape))}]",
             f"<- {_list_arrays(row.arrays)}", row.how, f"({row.why})")
            for row in self.rows
        ]  # fmt: skip

    def _rest(self) -> list[str]:
        lines = []
        for says, names in (
            ("set to 1, as statistics are there", self.counters),
            ("set to 0", self.zeros),
            ("kept as they were", self.kept),
            ("not wanted", self.ignored),
        ):
            if names:
                lines.append(f"{says}: {a_few(names, 6)}")
        if self.constants:
            named = a_few(self.constants, 3)
            lines.append(f"{len(self.constants)} arrays that are no weights: {named}")
        for name, first in self.tied.items():
            lines.append(f"once more the same: {name}, as {first}")
        if self.tried:
            lines.append(f"compared with the reference: {self.tried} tried, 1 agrees")
        return lines


def _list_arrays(arrays: tuple[str, ...]) -> str:
    if len(arrays) <= 4:
        return " + ".join(arrays)
    return f"{' + '.join(arrays[:2])} + ... + {arrays[-1]} ({len(arrays)} arrays)"
