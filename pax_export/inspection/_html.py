"""Inspections as HTML with collapsible modules and no external resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from pax_export._files import overwrite_guard, single_file
from pax_export.inspection._row import Row
from pax_export.inspection._table import COLUMNS, Column, totals

_MARK = "<!-- pax_export inspection -->"
_OPEN_LEVELS = 2
_LETTER, _DIGIT, _BOLD = 0.57, 0.64, 0.76  # of the height of a line, as wide fonts have them
_GAP = 0.8
_SHORT = 12  # letters; cells of a column with more are broken where the page is narrow
_STYLE = """
.pax-inspect { font: 12px/1.5 system-ui, sans-serif; overflow-x: auto; }
.pax-inspect .row { display: grid; gap: 0 .8em; overflow-wrap: anywhere;
  min-width: min(48em, var(--pax-width)); max-width: var(--pax-width);
  grid-template-columns: var(--pax-columns); }
.pax-inspect .head { font-weight: 600; border-bottom: 1px solid #8886; }
.pax-inspect summary { cursor: pointer; list-style: none; }
.pax-inspect summary .row > :first-child::before { content: "▸ "; }
.pax-inspect details[open] > summary .row > :first-child::before { content: "▾ "; }
.pax-inspect .row:hover { background: #8882; }
.pax-inspect .number { text-align: right; white-space: nowrap; }
.pax-inspect .array { opacity: .75; }
.pax-inspect code { font: 11px ui-monospace, monospace; }
.pax-inspect .frozen .role { color: #36c; } .pax-inspect .state .role { color: #a60; }
"""


def page(rows: Sequence[Row], uncounted: Sequence[str]) -> str:
    """A page of its own."""
    title = escape(rows[0].class_name)
    return (
        f'<!doctype html>\n{_MARK}\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title></head>\n<body>\n<h1>{title}</h1>\n{fragment(rows, uncounted)}\n"
        "</body></html>\n"
    )


def fragment(rows: Sequence[Row], uncounted: Sequence[str]) -> str:
    """What a notebook shows."""
    shown = [column for column in COLUMNS if any(column[1](row) for row in rows)]
    columns = " ".join(_track(_width(column, rows)) for column in shown)
    width = sum(_width(column, rows) + _GAP for column in shown)
    head = "".join(
        f'<span class="{"number" if right else ""}">{title}</span>' for title, _, right in shown
    )
    cells = {row.path: _cells(row, shown) for row in rows}
    body = "\n".join(_nested(rows, cells))
    lines = "<br>".join(map(escape, totals(rows, uncounted)))
    return (
        f'<div class="pax-inspect" style="--pax-columns: {columns}; --pax-width: {width:.1f}em">'
        f"<style>{_STYLE}</style>\n"
        f'<div class="row head">{head}</div>\n{body}\n<p>{lines}</p></div>'
    )


def _width(column: Column, rows: Sequence[Row]) -> float:
    """The width of the longest cell, or of the title's longest word; each row is a grid."""
    title, text, right = column
    cells = (_DIGIT if right else _LETTER) * max(len(text(row)) for row in rows)
    return max(_BOLD * max(map(len, title.split())), cells)


def _track(width: float) -> str:
    """A column of the grid; on a narrow page the long ones share what the short ones leave."""
    return f"{width:.1f}em" if width <= _SHORT * _DIGIT else f"minmax(4em, {width:.1f}fr)"


def _nested(rows: Sequence[Row], cells: dict[str, str]) -> Iterator[str]:
    """A `details` for each module, around what is below it."""
    depths: list[int] = []
    for row in rows:
        while depths and depths[-1] >= row.depth:
            depths.pop()
            yield "</details>"
        if row.kind == "array":
            yield f'<div class="row array {row.role}">{cells[row.path]}</div>'
        else:
            mark = " open" if row.depth < _OPEN_LEVELS else ""
            line = f'<div class="row {row.role}">{cells[row.path]}</div>'
            yield f"<details{mark}><summary>{line}</summary>"
            depths.append(row.depth)
    yield from ["</details>"] * len(depths)


def _cells(row: Row, shown: list) -> str:
    return "".join(_cell(row, *column) for column in shown)


def _cell(row: Row, title: str, text: Callable[[Row], str], right: bool) -> str:
    kind = "number" if right else title.replace(" ", "-")
    content = escape(text(row))
    if not right:  # lines break between names and sizes, rather than in a word
        content = re.sub(r"(?<=[.,])(?=[^. ])|(?=\[)|(?<=[a-z])(?=[A-Z])", "<wbr>", content)
    if title == "path":
        indent = f' style="padding-left: {row.depth * 1.2:g}em"'
        whole = escape(text(row).strip(), quote=True)
        return f'<span class="{kind}"{indent}><code title="{whole}">{content.strip()}</code></span>'
    return f'<span class="{kind}">{content}</span>'


def save(text: str, path: Path, overwrite: bool) -> Path:
    """Writes the page, over nothing else than another one."""
    with single_file.replaced(path, _is_page if overwrite else None) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _is_page(path: Path) -> overwrite_guard.Belongs | None:
    with path.open("rb") as file:
        return (lambda name: True) if _MARK.encode() in file.read(200) else None
