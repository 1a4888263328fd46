"""Sorting and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import rule
from pax_export.export.formats.onnx.values import Value

Results = Sequence[Any]


def _ranked(writer: Writer, x: object, count: int, axis: int, largest: bool) -> list[str]:
    """The extreme numbers and where they are; of equal ones the first comes first."""
    return writer("TopK", x, count, results=2, axis=axis, largest=int(largest), sorted=1)


def _key(writer: Writer, x: Value) -> Any:
    return writer.cast(x, np.int32) if x.dtype == np.bool_ else x.name


def _order(writer: Writer, key: object, x: Value, axis: int, size: int) -> str:
    """Where the numbers go in ascending order, NaN last; equal ones stay in their order."""
    if not x.is_float:
        return _ranked(writer, key, size, axis, largest=False)[1]
    bad = writer("IsNaN", key)
    # NaN has no order in ONNX: infinite at first, and then behind all that is no NaN.
    clean = writer("Where", bad, writer.like(np.inf, x), key)
    first = _ranked(writer, clean, size, axis, largest=False)[1]
    moved = writer("GatherElements", writer.cast(bad, np.int32), first, axis=axis)
    second = _ranked(writer, moved, size, axis, largest=False)[1]
    return writer("GatherElements", first, second, axis=axis)


@rule("sort")
def sort(
    writer: Writer,
    results: Results,
    *operands: Value,
    dimension: int,
    num_keys: int,
    **_: object,
) -> list[str]:
    keys = operands[:num_keys]
    size = writer.sizes.one(operands[0].shape[dimension])
    order: str | None = None
    for each in reversed(keys):  # the last key first, since equal numbers stay in order
        key = _key(writer, each)
        if order is not None:
            key = writer("GatherElements", key, order, axis=dimension)
        found = _order(writer, key, each, dimension, size)
        order = found if order is None else writer("GatherElements", order, found, axis=dimension)
    return [writer("GatherElements", x, order, axis=dimension) for x in operands]


@rule("top_k")
def top_k(
    writer: Writer, results: Results, x: Value, *, k: object, axis: int = -1, **_: object
) -> list[str]:
    axis = axis % x.rank
    return extremes(writer, results, x, k, axis, largest=True)


@rule("approx_top_k")
def approx_top_k(
    writer: Writer,
    results: Results,
    x: Value,
    *,
    k: object,
    reduction_dimension: int,
    is_max_k: bool,
    **_: object,
) -> list[str]:
    return extremes(writer, results, x, k, reduction_dimension % x.rank, largest=is_max_k)


def extremes(
    writer: Writer, results: Results, x: Value, count: object, axis: int, largest: bool
) -> list[str]:
    key = _key(writer, x)
    amount = writer.sizes.one(count)
    if x.is_float:
        bad = writer("IsNaN", key)
        end = np.inf if largest else -np.inf
        edge = writer("Where", bad, writer.like(end, x), key)
        size = writer.sizes.one(x.shape[axis])
        first = _ranked(writer, edge, size, axis, largest)[1]
        moved = writer("GatherElements", writer.cast(bad, np.int32), first, axis=axis)
        second = _ranked(writer, moved, amount, axis, largest=True)[1]
        place = writer("GatherElements", first, second, axis=axis)
    else:
        place = _ranked(writer, key, amount, axis, largest)[1]
    found = writer("GatherElements", x, place, axis=axis)
    index = place if results[1].dtype == np.int64 else writer.cast(place, np.int32)
    return [found, index]
