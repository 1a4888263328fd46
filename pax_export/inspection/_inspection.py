"""Inspection: rows that print, render in notebooks, and convert to data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pax_export.inspection import _html, _table
from pax_export.inspection._row import Count, Row


@dataclass(frozen=True)
class Inspection:
    """A description of a model: ``print`` shows a table, notebooks show HTML, and it is data.

    Attributes:
        rows: one for each module and array, in tree order, parents first.
        uncounted: operations of the call whose work is in no count.

    Example:
        >>> import pax_export as pax
        >>> found = pax.inspect(pax.Sequential(pax.Linear(2, 3)))
        >>> found["modules.0.weight"].shape, found.bytes
        ((2, 3), 36)
    """

    rows: tuple[Row, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many elements are trainable or frozen."""
        return self.rows[0].parameters

    @property
    def bytes(self) -> int:
        """Of all arrays, state too."""
        return self.rows[0].bytes

    @property
    def flops(self) -> Count | None:
        """Of one call; None without inputs, and of an export whose program cannot be read."""
        return self.rows[0].flops

    def __getitem__(self, path: str) -> Row:
        """Returns the row of a path.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data, with the totals ``parameters``, ``bytes``, ``flops``."""
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "flops": self.flops,
            "transcendentals": self.rows[0].transcendentals,
            "uncounted": list(self.uncounted),
            "rows": [asdict(row) for row in self.rows],
        }

    def table(self, depth: int | None = None, arrays: bool = True) -> str:
        """Returns the table as text.

        Args:
            depth: how many levels are shown; None shows all.
            arrays: whether arrays have lines of their own.
        """
        return _table.table(self.rows, self.uncounted, depth, arrays)

    def to_html(self) -> str:
        """Returns a complete HTML page without external resources."""
        return _html.page(self.rows, self.uncounted)

    def save_html(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the page into a file, whole or not at all.

        Args:
            path: of the file; conventionally it ends in ``.html``.
            overwrite: whether a page that was written so before is replaced.

        Raises:
            ExportPathError: (an OSError) the file cannot be written.
        """
        return _html.save(self.to_html(), Path(path), overwrite)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _html.fragment(self.rows, self.uncounted)
