"""Tables of reports: rows by path, sizes with their units, and HTML for notebooks.

HTML is escaped, and has no scripts or external resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Generic, Protocol, TypeVar


class _HasPath(Protocol):
    @property
    def path(self) -> str: ...


R = TypeVar("R", bound=_HasPath)


class RowsByPath(Generic[R]):
    """A table whose rows have paths: ``table[path]`` is a row."""

    rows: tuple[R, ...]

    def __getitem__(self, path: str) -> R:
        """Returns the row of a path.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def __iter__(self) -> Iterator[R]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def aligned(rows: Iterable[Sequence[str]], right: Iterable[bool] = ()) -> list[str]:
    """Lines with aligned columns; those that `right` marks, such as numbers, at their right.

    Example:
        >>> aligned([("a", "1"), ("bc", "20")], right=(False, True))
        ['a    1', 'bc  20']
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    sides = [str.rjust if each else str.ljust for each in right] or [str.ljust] * len(widths)
    cells = [[side(x, n) for side, x, n in zip(sides, line, widths)] for line in lines]
    return ["  ".join(line).rstrip() for line in cells]


def bytes_text(count: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> bytes_text(5), bytes_text(36 * 2**20)
        ('5 B', '36.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


_STYLE = (
    "<style>.pax-report { font: 13px/1.5 system-ui, sans-serif; overflow-x: auto; }"
    ".pax-report table { border-collapse: collapse; margin: .4em 0; }"
    ".pax-report th { text-align: left; border-bottom: 1px solid #8886; }"
    ".pax-report th, .pax-report td { padding: 0 1.2em 0 0; white-space: pre; }"
    ".pax-report td { font: 12px/1.6 ui-monospace, monospace; text-align: left; }</style>"
)


def block(title: str, *parts: str) -> str:
    """Returns HTML for notebooks; the parts are HTML already."""
    head = f"<b>{escape(title)}</b>" if title else ""
    return f'<div class="pax-report">{_STYLE}{head}{"".join(parts)}</div>'


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; empty without rows."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{f'<tr>{titles}</tr>' if titles else ''}{body}</table>"


def lines(texts: Iterable[str]) -> str:
    """Returns lines as HTML; empty ones are omitted."""
    return "".join(f"<div>{escape(text)}</div>" for text in texts if text)


def report(text: str) -> str:
    """A printed report: its first line as a title, ``key   value`` lines as a table."""
    title, *rest = text.splitlines() or [""]
    cells = [line[2:].split("  ", 1) if line.startswith("  ") else [line] for line in rest]
    return block(title, grid((), [[cell.strip() for cell in row] for row in cells]))
