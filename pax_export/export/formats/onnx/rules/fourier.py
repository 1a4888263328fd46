"""Long Fourier transforms, one axis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_export.export.formats.onnx.graph import Writer
from pax_export.export.formats.onnx.registry import Refused, complex_rule
from pax_export.export.formats.onnx.rules.slices import backwards
from pax_export.export.formats.onnx.values import AnyValue, Parts, Value, part_dtype

Results = Sequence[Any]
#: ``DFT`` has its axis as an operand from here on.
_AXIS_IS_OPERAND = 20


@complex_rule("fft")
def fft(
    writer: Writer, results: Results, x: AnyValue, *, fft_type: object, fft_lengths: Sequence[Any]
) -> Any:
    (result,) = results
    name = str(getattr(fft_type, "name", fft_type)).rsplit(".", 1)[-1].upper()
    half = np.dtype(part_dtype(result.dtype) or result.dtype)
    rank = len(result.shape)
    axes = list(range(rank - len(fft_lengths), rank))
    parts = [each.name for each in x.parts] if isinstance(x, Parts) else [x.name]
    sizes = dict(zip(axes, fft_lengths))
    inverse = name in ("IFFT", "IRFFT")
    if name == "RFFT":
        last = axes[-1]
        parts = _transformed(writer, parts, last, sizes[last], rank, False)
        parts = [writer.slice(each, last, 0, result.shape[last]) for each in parts]
        axes = axes[:-1]
    elif name == "IRFFT":
        for axis in axes[:-1]:
            parts = _transformed(writer, parts, axis, sizes[axis], rank, True)
        last = axes[-1]
        parts = _mirrored(writer, parts, last, sizes[last])
        axes = [last]
    elif name not in ("FFT", "IFFT"):
        raise Refused(f"of the kind {name}")
    for axis in axes:
        parts = _transformed(writer, parts, axis, sizes[axis], rank, inverse)
    if name == "IRFFT":
        return parts[0]
    one, other = (Value(each, half, tuple(result.shape)) for each in parts)
    return Parts((one, other), result.dtype)


def _mirrored(writer: Writer, parts: list[str], axis: int, size: int) -> list[str]:
    """All frequencies of real numbers, from those that are not negative."""
    one, negative = (size + 1) // 2, []
    for index, part in enumerate(parts):
        kept = writer.slice(part, axis, 1, one)
        turned = backwards(writer, kept, [axis])
        negative.append(writer("Neg", turned) if index else turned)
    whole = [writer.slice(part, axis, 0, size // 2 + 1) for part in parts]
    return [writer("Concat", *both, axis=axis) for both in zip(whole, negative)]


def _transformed(
    writer: Writer, parts: list[str], axis: int, size: int, rank: int, inverse: bool
) -> list[str]:
    apart = [writer.unsqueeze(each, [rank]) for each in parts]
    pair = writer("Concat", *apart, axis=rank) if len(apart) > 1 else apart[0]
    if writer.opset >= _AXIS_IS_OPERAND:
        made = writer("DFT", pair, None, np.array(axis, np.int64), inverse=int(inverse))
    else:
        made = writer("DFT", pair, axis=axis, inverse=int(inverse))
    return [writer("Gather", made, np.array(index, np.int64), axis=rank) for index in range(2)]
