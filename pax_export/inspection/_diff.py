"""`diff`: compares models and exports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pax_export._foundations import tables
from pax_export._foundations.types import Array, PyTree
from pax_export.core import Module, named_leaves
from pax_export.inspection._inspect import arrays_of, inspect, inspect_export
from pax_export.inspection._table import Row


@dataclass(frozen=True)
class Change:
    """One array that differs.

    Attributes:
        path: the path of the leaf.
        kind: ``"added"`` or ``"dropped"`` in the second model; ``"reshaped"``; ``"retyped"``;
            ``"changed"`` in value.
        before: shape and dtype in the first model; empty if it is missing.
        after: the same for the second model.
        difference: the largest absolute difference of values; None if they were not
            compared.

    Example:
        >>> import pax_export as pax
        >>> norm = pax.LayerNorm(2)
        >>> change, = pax.inspection.diff(norm, norm.replace(scale=norm.scale + 1))
        >>> change.path, change.kind, change.difference
        ('scale', 'changed', 1.0)
    """

    path: str
    kind: Literal["added", "dropped", "reshaped", "retyped", "changed"]
    before: str = ""
    after: str = ""
    difference: float | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.kind}"
        shapes = " -> ".join(dict.fromkeys(filter(None, (self.before, self.after))))
        text += f", {shapes}" if shapes else ""
        return text + ("" if self.difference is None else f", by at most {self.difference:.3g}")


@dataclass(frozen=True)
class Diff:
    """The differences of two models; false if there are none.

    Attributes:
        changes: one for each array that differs, in the order of the first model, then arrays of
            the second only.
        unseen: arrays whose values were not compared, because one model does not store them by
            name.

    Example:
        >>> import pax_export as pax
        >>> layer = pax.Linear(2, 1)
        >>> bool(pax.inspection.diff(layer, layer))
        False
    """

    changes: tuple[Change, ...]
    unseen: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        lines = [str(change) for change in self.changes] or ["no difference"]
        if self.unseen:
            lines.append(f"values of {len(self.unseen)} arrays are not kept by name: not compared")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (each.path, each.kind, each.before, each.after,
             "" if each.difference is None else f"{each.difference:.3g}")
            for each in self.changes
        ]  # fmt: skip
        head = ("path", "change", "before", "after", "at most")
        rest = str(self).splitlines()[len(rows) :]
        return tables.block("", tables.grid(head, rows), tables.lines(rest))


def diff(first: object, second: object) -> Diff:
    """Compares two models, exports, or one of each, array by array.

    Args:
        first: a module, or the path of an export.
        second: likewise.  Values are compared where both keep them by name: modules,
            SavedModels and StableHLO bundles do, TFLite and ONNX models do not.

    Returns:
        A `Diff`.

    Example:
        >>> import tempfile, pax_export as pax
        >>> net = pax.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pax.export.to_stablehlo(net, folder + "/net", pax.export.spec("b, 3"))
        ...     print(pax.inspection.diff(net, folder + "/net"))
        no difference
    """
    (rows, values), (others, other_values) = _read_arrays(first), _read_arrays(second)
    changes, unseen = [], []
    for path, row in rows.items():
        if path not in others:
            changes.append(Change(path, "dropped", _array_text(row)))
            continue
        change = _find_change(path, row, others[path], values.get(path), other_values.get(path))
        if change is not None:
            changes.append(change)
        if path not in values or path not in other_values:
            unseen.append(path)
    new = (path for path in others if path not in rows)
    changes += [Change(path, "added", after=_array_text(others[path])) for path in new]
    return Diff(tuple(changes), tuple(unseen))


def _read_arrays(model: PyTree) -> tuple[dict[str, Row], Mapping[str, Any]]:
    if isinstance(model, (str, os.PathLike)):
        found, values = inspect_export(Path(model)), arrays_of(Path(model))
    else:
        found = inspect(model)
        values = dict(named_leaves(model)) if isinstance(model, Module) else {}
    return {row.path: row for row in found if row.kind == "array"}, values


def _find_change(
    path: str, row: Row, other: Row, a: Array | None, b: Array | None
) -> Change | None:
    before, after = _array_text(row), _array_text(other)
    if row.shape != other.shape:
        return Change(path, "reshaped", before, after)
    difference = None if a is None or b is None else _largest_difference(a, b)
    if row.dtype != other.dtype:
        return Change(path, "retyped", before, after, difference)
    return Change(path, "changed", before, "", difference) if difference else None


def _largest_difference(a: Array, b: Array) -> float | None:
    """The largest absolute difference; NaN at the same place is none."""
    if str(a.dtype).startswith("key<") or str(b.dtype).startswith("key<"):
        return None
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype == y.dtype and x.tobytes() == y.tobytes():
        return 0.0
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    gap = np.abs(x.astype(wide) - y.astype(wide))
    same_nan = np.isnan(x.astype(wide)) & np.isnan(y.astype(wide))
    return float(np.max(np.where(same_nan, 0, gap), initial=0))


def _array_text(row: Row) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape or ()))}]"
