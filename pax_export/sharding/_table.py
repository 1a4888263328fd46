"""Tables of the arrays that each device would hold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pax_export._foundations import tables
from pax_export._foundations.tables import bytes_text
from pax_export._foundations.types import AnyMesh, PyTree
from pax_export.core import Spec
from pax_export.sharding._leaf_shardings import LeafSharding, leaf_shardings, spec_text
from pax_export.sharding._mesh import mesh_text, sizes_of
from pax_export.sharding._rules import Rules, RulesLike, Sizes, leaf_paths


@dataclass(frozen=True)
class Row:
    """One leaf of a table.

    Attributes:
        path: the dotted path.
        shape: the shape of the whole array.
        dtype: the name of the dtype.
        spec: the partition spec, as a tuple; ``()`` is replicated.
        shard_shape: the shape of one device's shard.
        bytes: the size of the whole array.
        bytes_per_device: the size of one device's shard.
        rule: the source of the spec, and why an axis is not split; empty if no rule matches.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=4)
        >>> table = pax.sharding.table(pax.Linear(8, 2), mesh, {"weight": ("data", None)})
        >>> table["weight"].shard_shape, table["weight"].bytes_per_device, table["weight"].rule
        ((2, 2), 16, "'weight'")
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    shard_shape: tuple[int, ...]
    bytes: int
    bytes_per_device: int
    rule: str


@dataclass(frozen=True)
class Table(tables.RowsByPath[Row]):
    """The leaves of a tree on a mesh; ``str(table)`` is the text, ``table[path]`` a row.

    The text has one line for the arrays of equal layers, with the size of one array.

    Attributes:
        mesh: the size of each axis.
        rows: one for each leaf, in tree order.

    Example:
        >>> import pax_export as pax
        >>> mesh = pax.sharding.abstract_mesh(data=4)
        >>> table = pax.sharding.table(pax.Linear(8, 2), mesh, {"weight": ("data", None)})
        >>> table.bytes, table.bytes_per_device, table.unmatched
        (72, 24, ('bias',))
    """

    mesh: dict[str, int]
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """The size of all arrays, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The number of bytes on one device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The paths that no rule is for; these leaves are replicated."""
        return tuple([row.path for row in self.rows if not row.rule])

    def __str__(self) -> str:
        return "\n".join([*tables.aligned([_HEAD, *self._cells()]), *_summary_lines(self)])

    def _repr_html_(self) -> str:
        grid = tables.grid(_HEAD, self._cells())
        return tables.block("", grid, tables.lines(_summary_lines(self)))

    def _cells(self) -> list[tuple[str, ...]]:
        return [_row_cells(path, row) for path, row in _merge_equal_rows(self.rows)]


def table(tree: PyTree, mesh: AnyMesh, rules: RulesLike = None) -> Table:
    """Plans the placement of a module: the shards and bytes per device.

    Nothing is placed or computed: module and mesh may be abstract.

    Args:
        tree: a module, or a pytree of modules and arrays; for a model too large to create,
            ``jax.eval_shape(constructor)``.
        mesh: a `jax.sharding.Mesh`, or an `abstract_mesh`.
        rules: `Rules`, or a mapping; see `Rules.of`.

    Returns:
        A `Table`.

    Raises:
        ShardingError: (a ValueError) a rule matches no leaf, or a spec does not fit its leaf or the
            mesh.
        InvalidArgumentTypeError: (a TypeError) not a mesh, or not rules.

    Example:
        >>> import jax, pax_export as pax
        >>> net = jax.eval_shape(lambda: pax.Linear(512, 1024))
        >>> mesh = pax.sharding.abstract_mesh(model=4)
        >>> print(pax.sharding.table(net, mesh, pax.sharding.tensor_parallel()))
        leaf    shape        dtype    spec              shard       per device  rule
        weight  (512, 1024)  float32  P(None, 'model')  (512, 256)  512.0 KiB   tensor_parallel
        bias    (1024,)      float32  P('model')        (256,)      1.0 KiB     tensor_parallel
        <BLANKLINE>
        mesh: model=4, 4 devices
        513.0 KiB per device of 2.0 MiB
    """
    sizes = sizes_of(mesh)
    found = leaf_shardings(leaf_paths(tree), sizes, Rules.of(rules))
    return Table(sizes, tuple([_make_row(each, sizes) for each in found]))


def _make_row(found: LeafSharding, sizes: Sizes) -> Row:
    leaf, shard = found.leaf, found.shard_shape(sizes)
    return Row(
        path=leaf.name,
        shape=leaf.shape,
        dtype=str(leaf.dtype),
        spec=found.spec,
        shard_shape=shard,
        bytes=leaf.size * leaf.dtype.itemsize,
        bytes_per_device=math.prod(shard) * leaf.dtype.itemsize,
        rule=found.source,
    )


_HEAD = ("leaf", "shape", "dtype", "spec", "shard", "per device", "rule")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _merge_equal_rows(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The rows, those of equal layers as one: ``layers.*.weight (80 times)``."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        rest = (row.shape, row.dtype, row.spec, row.rule)
        alike.setdefault((_NUMBER.sub("*", row.path), rest), []).append(row)
    return [
        (f"{path} ({len(same)} times)" if len(same) > 1 else same[0].path, same[0])
        for (path, _), same in alike.items()
    ]


def _row_cells(path: str, row: Row) -> tuple[str, ...]:
    return (
        path, str(row.shape), row.dtype, spec_text(row.spec), str(row.shard_shape),
        bytes_text(row.bytes_per_device), row.rule or "none: replicated",
    )  # fmt: skip


def _summary_lines(table: Table) -> list[str]:
    lines = [
        "",
        f"mesh: {mesh_text(table.mesh)}, {math.prod(table.mesh.values())} devices",
        f"{bytes_text(table.bytes_per_device)} per device of {bytes_text(table.bytes)}",
    ]
    others = [row for row in table.rows if not row.rule]
    if others:
        names = ", ".join([path for path, _ in _merge_equal_rows(others)])
        lines.append(f"no rule is for, so replicated: {names}")
    return lines
