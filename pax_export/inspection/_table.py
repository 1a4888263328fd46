"""Prints the rows of an inspection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pax_export._files import bytes_text
from pax_export.inspection._row import Row

Column = tuple[str, Callable[[Row], str], bool]  # its title, its text, whether numbers stand right


def table(rows: Sequence[Row], uncounted: Sequence[str], depth: int | None, arrays: bool) -> str:
    """Aligned non-empty columns, and a line of totals."""
    picked = [
        row
        for row in rows
        if (arrays or row.kind == "module") and (depth is None or row.depth <= depth)
    ]
    shown = [column for column in COLUMNS if any(column[1](row) for row in picked)]
    lines = [[title for title, _, _ in shown]]
    lines += [[text(row) for _, text, _ in shown] for row in picked]
    widths = [max(map(len, column)) for column in zip(*lines)]
    right = [numbers for _, _, numbers in shown]
    text = [
        "  ".join(
            cell.rjust(width) if numbers else cell.ljust(width)
            for cell, width, numbers in zip(line, widths, right)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*text, "", *totals(rows, uncounted)])


def totals(rows: Sequence[Row], uncounted: Sequence[str]) -> Iterator[str]:
    """Totals of the model, and what they exclude."""
    root = rows[0]
    parts = {"trainable": 0, "frozen": 0, "state": 0}
    for row in rows:
        if row.kind == "array":
            parts[row.role] += math.prod(row.shape or ())
    line = f"{root.parameters:,} parameters"
    if root.parameters and parts["frozen"] == 0:
        line += ", all trainable"
    elif parts["frozen"]:
        line += f" ({parts['trainable']:,} trainable, {parts['frozen']:,} frozen)"
    if parts["state"]:
        line += f", {parts['state']:,} elements of state"
    line += f", {bytes_text(root.bytes)}"
    if root.flops is not None:
        line += f"; {count_text(root.flops)} FLOPs a call"
    yield line
    if uncounted:
        yield f"not counted: {', '.join(uncounted)}"


def count_text(count: int | str | None) -> str:
    """A number of operations as people read it; a formula as it is."""
    return f"{count:,}" if isinstance(count, int) else count or ""


def _path(row: Row) -> str:
    return "  " * row.depth + (row.path or "(root)")


def _class(row: Row) -> str:
    if row.kind == "array":
        return f"{row.dtype}[{','.join(map(str, row.shape or ()))}]"
    function = f"({row.function})" if row.function else ""
    return row.class_name + function + (f" {row.name!r}" if row.name else "")


COLUMNS: tuple[Column, ...] = (
    ("path", _path, False),
    ("class", _class, False),
    ("in", lambda row: " ".join(row.inputs), False),
    ("out", lambda row: " ".join(row.outputs), False),
    ("calls", lambda row: str(row.calls) if row.calls > 1 else "", True),
    ("dtype", lambda row: row.dtype if row.kind == "module" else "", False),
    ("computed in", lambda row: row.computed_in if row.computed_in != row.dtype else "", False),
    ("role", lambda row: row.role, False),
    ("parameters", lambda row: f"{row.parameters:,}" if row.parameters else "", True),
    ("bytes", lambda row: bytes_text(row.bytes) if row.bytes else "", True),
    ("flops", lambda row: count_text(row.flops), True),
    ("time", lambda row: "" if row.time_share is None else f"{row.time_share:.1%}", True),
)
