"""Sorting and top-k, by TFLite's stable `TOPK_V2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.tflite.builder import moves
from pax_export.export.formats.tflite.builder import operators as lite
from pax_export.export.formats.tflite.builder.graph import Tensor
from pax_export.export.formats.tflite.rule import Operation, rule
from pax_export.export.formats.tflite.rules.comparison import ordered
from pax_export.export.formats.tflite.tensors import reshape, transpose


@rule("sort")
def sort(op: Operation, *xs: Tensor) -> list[Any]:
    axis, keys = op.params["dimension"], op.params["num_keys"]
    shape = list(op.operands[0].shape)
    rank = len(shape)
    order = [*(each for each in range(rank) if each != axis), axis]
    count = op.sizes.of(shape[axis])
    rows = _rows([shape[each] for each in order])
    flat = [reshape(transpose(x, order), rows, op.sizes) for x in xs]
    for place in reversed(range(keys)):  # the last key first, and each is stable
        places = _sorted_places(lite.subtract(-1, ordered(flat[place], _kind(op, place))), count)
        flat = [at_places(x, places) for x in flat]
    back = [order.index(each) for each in range(rank)]
    moved = [shape[each] for each in order]
    return [transpose(reshape(x, moved, op.sizes), back) for x in flat]


def _kind(op: Operation, place: int) -> str:
    return op.operands[place].dtype.name


def _rows(shape: Sequence[Any]) -> list[Any]:
    product: Any = 1
    for size in shape[:-1]:
        product = product * size
    return [product, shape[-1]]


def _sorted_places(keys: Any, count: object) -> Any:
    """The places of the largest first, in each row."""
    return lite.top_k(keys, count)[1]


def at_places(x: Tensor, places: object) -> Any:
    """From each row, the elements at its places."""
    return moves.gather(x, places, batch_dims=1, axis=1)


@rule("top_k", "approx_top_k")
def top_k(op: Operation, x: Any) -> list[Any]:
    params = op.params
    axis = params.get("operand_axis", params.get("axis", params.get("reduction_dimension", -1)))
    rank = len(op.shape)
    axis %= rank
    shape = op.operands[0].shape
    order = [*(each for each in range(rank) if each != axis), axis]
    rows = reshape(transpose(x, order), _rows([shape[each] for each in order]), op.sizes)
    keys = ordered(rows, op.dtype, equal_zeros=False)
    if not params.get("is_max_k", True):
        keys = lite.subtract(-1, keys)
    count = op.sizes.of(op.shape[axis])
    places = _sorted_places(keys, count)
    values = at_places(rows, places)
    moved = [op.shape[each] for each in order]
    back = [order.index(each) for each in range(rank)]
    kind = np.dtype(op.results[1].dtype).name
    places = lite.cast(places, lite.int64) if kind == "int64" else places
    return [transpose(reshape(each, moved, op.sizes), back) for each in (values, places)]
