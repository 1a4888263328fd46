"""Tables of reports: rows by path, sizes with their units, and HTML for notebooks.

HTML is escaped, and has no scripts or external resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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
