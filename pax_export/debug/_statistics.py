"""`statistics`: summary statistics of the outputs of all modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pax_export._foundations.files import html_text
from pax_export._foundations.types import PyTree
from pax_export.core import is_array, path_name
from pax_export.debug._capture import capture


@dataclass(frozen=True)
class Statistics:
    """Summary statistics of one array.

    Attributes:
        mean: the mean; like all but `nan`, without NaN.
        std: the standard deviation.
        min: the smallest element.
        max: the largest element.
        nan: the share of NaN.
        zeros: the share of zeros.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> pax.debug.statistics(pax.Identity(), jnp.array([0.0, 2.0]))[""].zeros
        0.5
    """

    mean: float
    std: float
    min: float
    max: float
    nan: float
    zeros: float


class Table(dict):
    """`Statistics` by path; it prints as a table."""

    def _table_lines(self) -> list[list[str]]:
        names = list(Statistics.__dataclass_fields__)
        return [["path", *names]] + [
            [path or "(root)", *(f"{getattr(row, name):.4g}" for name in names)]
            for path, row in self.items()
        ]

    def _repr_html_(self) -> str:
        head, *rows = self._table_lines()
        return html_text.block("", html_text.grid(head, rows))

    def __str__(self) -> str:
        lines = self._table_lines()
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        )


def statistics(net: PyTree, *inputs: PyTree, paths: object = ..., **kwargs: object) -> Table:
    """Calls a net, and returns statistics of the outputs of its modules.

    Args:
        net: a module.
        *inputs: its inputs.
        paths: the modules, as for `capture`.
        **kwargs: its keyword inputs.

    Returns:
        A dict from paths to `Statistics`, which prints as a table.  A module that
        returns several arrays has a row for each.

    Example:
        >>> import jax, jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Lambda(lambda x: x - 2), jax.nn.relu)
        >>> print(pax.debug.statistics(net, jnp.arange(5.0)))
        path       mean    std  min  max  nan  zeros
        (root)      0.6    0.8    0    2    0    0.6
        modules.0     0  1.414   -2    2    0    0.2
        modules.1   0.6    0.8    0    2    0    0.6
    """
    captured = capture(net, paths)

    @jax.jit
    def numbers(arrays: list[Any]) -> list[Any]:
        return [_statistics_of(array) for array in arrays]

    values = captured(*inputs, **kwargs)[1]
    named: list[tuple[str, Any]] = []
    for path in (path for path in captured.paths if path in values):
        for key, leaf in jax.tree_util.tree_flatten_with_path(values[path])[0]:
            if is_array(leaf) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.number):
                named.append((".".join(filter(None, [path, path_name(key)])), leaf))
    rows = numbers([leaf for _, leaf in named])
    return Table((name, Statistics(*map(float, row))) for (name, _), row in zip(named, rows))


def _statistics_of(array: PyTree) -> list[Any]:
    values = jnp.abs(array) if jnp.iscomplexobj(array) else array
    values = values.astype(jnp.float32)
    nan = jnp.isnan(values)
    return [
        jnp.nanmean(values),
        jnp.nanstd(values),
        jnp.nanmin(values),
        jnp.nanmax(values),
        nan.mean(),
        (values == 0).mean(),
    ]
