"""Inspection: rows that print, render in notebooks, and convert to data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from pax_export._foundations.files import atomic, own_files
from pax_export._foundations.tables import RowsByPath, aligned, bytes_text

Count = int | str


@dataclass(frozen=True)
class Row:
    """A module or an array of a model.

    Counts of a module include everything below it. A count is a number, or a formula as text if
    inputs have symbolic sizes.

    Attributes:
        path: the dotted path, as in errors; empty for the root.
        kind: ``"module"`` or ``"array"``.
        depth: the number of modules around it.
        class_name: the class of a module; empty for arrays.
        name: the ``name`` of a module, or None.
        mode: ``"train"`` or ``"eval"`` for a module.
        shape: the shape of an array.
        inputs: the inputs of a module's first call: ``float32[batch,3]``.
        outputs: the outputs of that call.
        calls: the number of calls of the module.
        dtype: the dtype of the arrays; several are joined by commas.
        computed_in: the dtype of most of its arithmetic; without inputs, that of its policy.
        role: ``"trainable"``, ``"frozen"`` or ``"state"``; for a module, the first of these that
            applies to one of its arrays; empty for an array of a file that is not trainable.
        declared: what the class of its layer says of an array, ``"kernel [in, out]"``, see
            `pax_export.Declared`; ``"no declaration"`` for a module with arrays of its own whose
            class says nothing.
        parameters: the number of elements that are trainable or frozen.
        bytes: the size of all arrays, including state.
        flops: additions, multiplications and comparisons of one call, as XLA counts them;
            None without inputs, or if the program of an export cannot be counted.
        transcendentals: exponentials, logarithms, roots, counted separately; None as for ``flops``.
        time_share: the share of the time of one call, if measured.
        function: the name of a `Lambda`'s function; else empty.

    Example:
        >>> import pax_export as pax
        >>> row = pax.inspect(pax.BatchNorm1D(3))["ema_mean.averages"]
        >>> row.kind, row.role, row.shape
        ('array', 'state', (1, 1, 3))
    """

    path: str
    kind: str
    depth: int = 0
    class_name: str = ""
    name: str | None = None
    mode: str = ""
    shape: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: int = 0
    dtype: str = ""
    computed_in: str = ""
    role: str = ""
    declared: str = ""
    parameters: int = 0
    bytes: int = 0
    flops: Count | None = None
    transcendentals: Count | None = None
    time_share: float | None = None
    function: str = ""


@dataclass(frozen=True)
class Inspection(RowsByPath[Row]):
    """A description of a model: ``print`` shows a table, notebooks show HTML, and it is data.

    Attributes:
        rows: one for each module and array, in tree order, parents first.
        uncounted: operations of the call without a FLOP count.

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
        """The number of elements that are trainable or frozen."""
        return self.rows[0].parameters

    @property
    def bytes(self) -> int:
        """The size of all arrays, including state."""
        return self.rows[0].bytes

    @property
    def flops(self) -> Count | None:
        """FLOPs of one call; None without inputs, or if the program of an export cannot be read."""
        return self.rows[0].flops

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, with the totals ``parameters``, ``bytes``, ``flops``."""
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
        picked = [
            row
            for row in self.rows
            if (arrays or row.kind == "module") and (depth is None or row.depth <= depth)
        ]
        shown = [column for column in COLUMNS if any(column.text(row) for row in picked)]
        lines = [[column.title for column in shown]]
        lines += [[column.text(row) for column in shown] for row in picked]
        right = [column.is_right for column in shown]
        return "\n".join([*aligned(lines, right), "", *_totals(self)])

    def to_html(self) -> str:
        """Returns a complete HTML page without external resources."""
        title = escape(self.rows[0].class_name)
        return (
            f'<!doctype html>\n{_MARK}\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{title}</title></head>\n<body>\n<h1>{title}</h1>\n"
            f"{self._repr_html_()}\n</body></html>\n"
        )

    def save_html(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the page to a file, atomically.

        Args:
            path: the path of the file, usually ``*.html``.
            overwrite: whether to replace an earlier page.

        Raises:
            ExportPathError: (an OSError) the file cannot be written.
        """
        return save_marked(self.to_html(), Path(path), _MARK, overwrite)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = [column for column in COLUMNS if any(map(column.text, self.rows))]
        tracks = " ".join(column.grid_track(self.rows) for column in shown)
        width = sum(column.width(self.rows) + _GAP for column in shown)
        head = "".join(
            f'<span class="{"number" if column.is_right else ""}">{column.title}</span>'
            for column in shown
        )
        body = "\n".join(_nest_rows(self.rows, shown))
        lines = "<br>".join(map(escape, _totals(self)))
        return (
            f'<div class="pax-inspect" style="--pax-columns: {tracks}; --pax-width: {width:.1f}em">'
            f"<style>{_STYLE}</style>\n"
            f'<div class="row head">{head}</div>\n{body}\n<p>{lines}</p></div>'
        )


class Column(NamedTuple):
    """A column of the table."""

    title: str
    text: Callable[[Row], str]
    is_right: bool = False

    def width(self, rows: Sequence[Row]) -> float:
        """The width of the longest cell, or of the title's longest word; each row is a grid."""
        cells = (_DIGIT if self.is_right else _LETTER) * max(len(self.text(row)) for row in rows)
        return max(_BOLD * max(map(len, self.title.split())), cells)

    def grid_track(self, rows: Sequence[Row]) -> str:
        """Returns a grid column; on a narrow page long columns share the remaining width."""
        width = self.width(rows)
        if width <= _SHORT * _DIGIT:
            return f"{width:.1f}em"
        pieces = (len(each) for row in rows for each in _BREAKS.sub(" ", self.text(row)).split())
        least = min(max(4.0, _LETTER * max(pieces)), 6.0)  # few lines break in a word
        return f"minmax({least:.1f}em, {width:.1f}fr)"

    def cell_html(self, row: Row) -> str:
        """Returns the cell of a row."""
        kind = "number" if self.is_right else self.title.replace(" ", "-")
        content = escape(self.text(row))
        if not self.is_right or "*" in content:
            kind += " formula" if self.is_right else ""
            content = _BREAKS.sub("<wbr>", content)
        if self.title == "path":
            indent = f' style="padding-left: {row.depth * 1.2:g}em"'
            code = f'<code title="{escape(row.path or "(root)")}">{content.strip()}</code>'
            return f'<span class="{kind}"{indent}>{code}</span>'
        return f'<span class="{kind}">{content}</span>'


def _totals(found: Inspection) -> Iterator[str]:
    """Returns the totals of the model, and what they exclude."""
    root = found.rows[0]
    parts = {"trainable": 0, "frozen": 0, "state": 0, "": 0}
    for row in found.rows:
        if row.kind == "array":
            parts[row.role] += math.prod(row.shape or ())
    line = f"{root.parameters:,} parameters"
    if parts["trainable"] and parts["frozen"] == 0:
        line += ", all trainable"
    elif parts["frozen"]:
        line += f" ({parts['trainable']:,} trainable, {parts['frozen']:,} frozen)"
    if parts["state"]:
        line += f", {parts['state']:,} elements of state"
    if parts["trainable"] and parts[""]:
        line += f", {parts['']:,} other elements"
    line += f", {bytes_text(root.bytes)}"
    if root.flops is not None:
        line += f"; {_count_text(root.flops)} FLOPs a call"
    yield line
    if found.uncounted:
        yield f"not counted: {', '.join(found.uncounted)}"


def _count_text(count: int | str | None) -> str:
    """Formats a count with separators; a formula stays unchanged."""
    return f"{count:,}" if isinstance(count, int) else count or ""


def _path_text(row: Row) -> str:
    return "  " * row.depth + (row.path or "(root)")


def _class_text(row: Row) -> str:
    if row.kind == "array":
        return f"{row.dtype}[{','.join(map(str, row.shape or ()))}]"
    function = f"({row.function})" if row.function else ""
    return row.class_name + function + (f" {row.name!r}" if row.name else "")


COLUMNS: tuple[Column, ...] = (
    Column("path", _path_text),
    Column("class", _class_text),
    Column("in", lambda row: " ".join(row.inputs)),
    Column("out", lambda row: " ".join(row.outputs)),
    Column("calls", lambda row: str(row.calls) if row.calls > 1 else "", True),
    Column("dtype", lambda row: row.dtype if row.kind == "module" else ""),
    Column("computed in", lambda row: row.computed_in if row.computed_in != row.dtype else ""),
    Column("role", lambda row: row.role),
    Column("declared", lambda row: row.declared if row.kind == "module" else ""),
    Column("parameters", lambda row: f"{row.parameters:,}" if row.parameters else "", True),
    Column("bytes", lambda row: bytes_text(row.bytes) if row.bytes else "", True),
    Column("flops", lambda row: _count_text(row.flops), True),
    Column("time", lambda row: "" if row.time_share is None else f"{row.time_share:.1%}", True),
)


_MARK = "<!-- pax_export inspection -->"
_LOOKED_AT = 400
_OPEN_LEVELS = 2
_LETTER, _DIGIT, _BOLD = 0.57, 0.64, 0.76  # of the height of a line, as wide fonts have them
_GAP = 0.8
_SHORT = 12  # letters; cells of a column with more are broken where the page is narrow
#: Lines break between names, sizes and factors, rather than in a word.
_BREAKS = re.compile(r"(?<=[.,*])(?=[^. ])|(?=[\[(])|(?<=[a-z])(?=[A-Z])")
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
.pax-inspect .formula { white-space: normal; }
.pax-inspect .array { opacity: .75; }
.pax-inspect code { font: 11px ui-monospace, monospace; }
.pax-inspect .frozen .role { color: #36c; } .pax-inspect .state .role { color: #a60; }
"""


def _nest_rows(rows: Sequence[Row], shown: list[Column]) -> Iterator[str]:
    """A `details` for each module, around the rows below it."""
    depths: list[int] = []
    for row in rows:
        while depths and depths[-1] >= row.depth:
            depths.pop()
            yield "</details>"
        cells = "".join(column.cell_html(row) for column in shown)
        if row.kind == "array":
            yield f'<div class="row array {row.role}">{cells}</div>'
        else:
            mark = " open" if row.depth < _OPEN_LEVELS else ""
            line = f'<div class="row {row.role}">{cells}</div>'
            yield f"<details{mark}><summary>{line}</summary>"
            depths.append(row.depth)
    yield from ["</details>"] * len(depths)


def save_marked(text: str, path: Path, mark: str, overwrite: bool) -> Path:
    """Writes a text that begins with a mark; replaces only files with that mark."""

    def recognize(path: Path) -> own_files.Belongs | None:
        with path.open("rb") as file:
            return (lambda name: True) if mark.encode() in file.read(_LOOKED_AT) else None

    with atomic.replace_file(path, recognize if overwrite else None) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
