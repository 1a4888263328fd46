"""Checks that a file has the model's quantized integers, and measures the runtime's kernels."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pax_export._foundations.errors import ValidationError
from pax_export.export.artifact.report import HALF
from pax_export.export.validation.validate import Case
from pax_export.precision.quantized import GROUP, Form, unpacked

#: The number of calls that measure the kernels' difference.
_CALLS = 3
#: The number of timed calls, of which the fastest counts.
_TIMED = 3
#: The factor by which a loss on other inputs may exceed that of the report.
_SLACK = 4.0


class Quantized(NamedTuple):
    """Integers of a weight in a file."""

    leaf: str  # name of the leaf
    form: Form  # the format of the leaf
    order: tuple[int, ...] | np.ndarray  # permutation of axes or elements in the file
    packed: bool = False  # whether two integers of 4 bits are in a byte, as in the leaf


class Arithmetic(NamedTuple):
    """The products of quantized weights in a file, and its roundings to half precision.

    Attributes:
        in_integers: the leaves that the runtime multiplies as integers.
        in_float32: those with products in float32, apart from products in loops.
        looked_up: tables of which rows are looked up.
        roundings: the dtype of each rounding, which takes two casts.
    """

    in_integers: Collection[str] = ()
    in_float32: Collection[str] = ()
    looked_up: Collection[str] = ()
    roundings: Sequence[str] = ()


def arithmetic_details(
    integers: Mapping[str, Any], accuracy_level: int, counted: Sequence[Arithmetic]
) -> dict[str, Any]:
    """The entries of a report about quantized weights and half precision in files."""
    found, others, tables, roundings = (tuple(chain(*each)) for each in zip(*counted))
    details: dict[str, Any] = {}
    if integers:
        details["quantized"] = {
            **integers,
            "multiplied": integers["weights"] - len({*tables} - {*found, *others}),
            "in integers": len({*found} - {*others}),
            "accuracy_level": accuracy_level,
        }
    if roundings:
        details[HALF] = {"roundings": len(roundings), "dtypes": sorted(set(roundings))}
    return details


def in_float32(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The entries about quantized weights of a file whose runtime multiplies in float32."""
    found = list(whole_leaves(stored, stored))
    bits = sorted({each.form.bits for each in found})
    details = {"weights": len(found), "bits": bits, "in integers": 0}
    return {"quantized": details} if found else {}


def whole_leaves(names: Iterable[str], stored: Mapping[str, Any]) -> Iterator[Quantized]:
    """The leaves of integers among the arrays of a file, which has them as the model does."""
    for name in names:
        scales = stored.get(f"{name.removesuffix('.integers')}.scales")
        if not name.endswith(".integers") or name not in stored or scales is None:
            continue
        sizes = stored[name].shape
        halved = [
            axis for axis, size in enumerate(sizes) if size == GROUP // 2 * scales.shape[axis]
        ]
        is_packed = bool(halved) and scales.dtype == np.float16
        axis = halved[0] - len(sizes) if is_packed else -1
        is_float = stored[name].dtype.name.startswith("float8")
        has_zeros = f"{name.removesuffix('.integers')}.zeros" in stored
        scheme = "float" if is_float else "asymmetric" if has_zeros else "symmetric"
        form = Form(4 if is_packed else 8, GROUP if is_packed else None, axis, "float32", scheme)
        yield Quantized(name, form, tuple(range(len(sizes))), True)


def check_integers(
    found: Iterable[tuple[Quantized, np.ndarray]],
    stored: Mapping[str, Any],
) -> dict[str, Any]:
    """Compares the integers of a file with leaves of the model, for the report."""
    bits: dict[str, int] = {}
    schemes: set[str] = set()
    for each, array in found:
        expected = np.asarray(stored[each.leaf])
        if each.form.bits == 4 and not each.packed:
            expected = unpacked(expected, each.form.axis)
        several = _lying(_bits_of(expected), each.order)
        array = _bits_of(np.asarray(array))
        expected = next((one for one in several if np.array_equal(one, array)), several[0])
        if not np.array_equal(array, expected):
            raise ValidationError(
                "The file does not contain the integers of a quantized weight.",
                where=each.leaf,
                got=f"{array.shape} with {np.count_nonzero(array != expected)} others"
                if array.shape == expected.shape
                else f"{array.shape} instead of {expected.shape}",
                write="validate=False to look at the export all the same, and please report it",
            )
        bits[each.leaf] = each.form.bits
        schemes.add(each.form.scheme)
    if not bits:
        return {}
    details = {"weights": len(bits), "bits": sorted(set(bits.values()))}
    return details | ({"schemes": sorted(schemes)} if schemes != {"symmetric"} else {})


def _bits_of(integers: np.ndarray) -> np.ndarray:
    """Small integers as int8; float8 numbers by their bits, so that zeros have signs."""
    is_float = integers.dtype.name.startswith("float")
    return integers.view(np.int8) if is_float else integers.astype(np.int8)


def _lying(integers: np.ndarray, order: tuple[int, ...] | np.ndarray) -> Sequence[np.ndarray]:
    """Returns the integers of a leaf in an order; for stacked layers, those of each."""
    if isinstance(order, tuple):
        return [integers.transpose(order)]
    flat = integers.reshape(-1)
    is_whole = order.max(initial=0) < order.size and flat.size % order.size == 0
    return list(flat.reshape(-1, order.size if is_whole else flat.size)[:, order])


def kernels_add(
    cases: Iterator[Case], call: Callable[[str, dict[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the runtime's differences from float32 arithmetic on the same integers.

    With them are the seconds of a call, the least of several.
    """
    pairs: list[Any] = []
    seconds: list[float] = []
    for case in itertools.islice(cases, _CALLS):
        got = call(case.signature, case.inputs)
        names = [n for n, each in case.expected.items() if n in got and each.dtype.kind in "fV"]
        both = (case.expected, got)
        pairs.append([[np.asarray(of[n], np.float64) for n in names] for of in both])
        for _ in range(0 if seconds else _TIMED):
            begin = time.perf_counter()
            call(case.signature, case.inputs)
            seconds.append(time.perf_counter() - begin)
    found = apart(pairs)._asdict().items()
    details: dict[str, Any] = {name: float(f"{x:.3g}") for name, x in found if x is not None}
    return details | {"seconds": [float(f"{min(seconds, default=0):.3g}")]}


def compare_quantized(
    case: Case, got: Mapping[str, np.ndarray], losses: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the largest difference of each output of a quantized export; empty without losses.

    Args:
        case: a call of the model.
        got: the results of the export.
        losses: the reported losses of weights and kernels that the model does not have itself.

    Raises:
        ValidationError: the mean difference exceeds the reported one.
    """
    right = {name: each for name, each in case.expected.items() if each.dtype.kind in "fV"}
    if not losses or not right:
        return {}
    one, other = ([np.asarray(of[name], np.float64) for name in right] for of in (right, got))
    allowed = sum(each["mean"] / (each["scale"] or 1) for each in losses)
    found = apart([(one, other)])
    if not found.mean <= _SLACK * allowed * found.scale:
        raise ValidationError(
            "The export differs from the model by more than the reported quantization loss.",
            where=case.signature,
            got=f"{found.mean / (found.scale or 1):.2g} of the outputs in the mean, and "
            f"{allowed:.2g} in the report",
            write="the model that was exported, as pax.quantize made it",
        )
    return {name: float(np.abs(a - b).max(initial=0)) for name, a, b in zip(right, one, other)}


# --- differences between outputs, of two nets or of a net and a file ----------------------


class Apart(NamedTuple):
    """Differences of all outputs; the last two are None unless they may be logits."""

    largest: float
    mean: float
    scale: float
    kl: float | None
    same_largest: float | None


def apart(pairs: Iterable[tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]) -> Apart:
    """Compares the outputs of calls, reference first; ignores where it is not finite.

    Where only the other output is not finite, they differ by infinity.
    """
    largest, total, size, count = 0.0, 0.0, 0.0, 0
    divergences: list[Any] = []
    same: list[Any] = []
    logits = True
    for old, new in pairs:
        for one, other in zip(old, new):
            known = np.isfinite(one)
            one, other = one[known], other[known]
            found = np.where(np.isfinite(other), np.abs(one - other), np.inf)
            largest = max(largest, float(found.max(initial=0)))
            total, count = total + float(found.sum()), count + found.size
            size += float(np.abs(one).sum())
        if len(old) == 1 and old[0].ndim > 1 and old[0].shape[-1] > 1 and old[0].size:
            divergences.append(_divergence(old[0], new[0]).ravel())
            same.append((old[0].argmax(-1) == new[0].argmax(-1)).ravel())
        else:
            logits = False
    means = [float(np.concatenate(each).mean()) for each in (divergences, same) if each]
    found = means if logits and means else [None, None]
    return Apart(largest, total / max(count, 1), size / max(count, 1), *found)


def _divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    one, other = _log_softmax(logits), _log_softmax(others)
    return np.sum(np.exp(one) * (one - other), -1)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    below = x - x.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))
