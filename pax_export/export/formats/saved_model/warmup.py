"""Requests that TensorFlow Serving answers before it serves a version: ``warmup=[1, 8, 64]``.

They are a TFRecord file of `PredictionLog` messages. Tensors of zeros are written as dtype and
shape; TensorFlow fills them up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.wire import Map, Schema, masked_crc32c
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dimensions import numpy_dtype
from pax_export.export.artifact.formats import WARMUP_REQUESTS
from pax_export.export.artifact.report import SignatureInfo
from pax_export.export.formats.saved_model.proto.nodes import Spec
from pax_export.export.formats.saved_model.proto.schemas import TENSOR
from pax_export.export.validation.serve import Arrays

#: The requests of one signature, by the label of their sizes.
Requests = dict[str, Arrays]
_MOST = 1000  # of TensorFlow Serving
_REQUEST = Schema(model_spec=(1, Schema(signature_name=3)), inputs=(2, Map(TENSOR)))
_LOG = Schema(predict_log=(6, Schema(request=(1, _REQUEST))))


def warmup_requests(
    warmup: Sequence[int | Mapping[str, int]],
    signatures: Mapping[str, SignatureInfo],
    examples: Mapping[str, Sequence[Arrays]],
) -> dict[str, Requests]:
    """The requests of each signature: its first example, repeated to the sizes, or zeros.

    Signatures that assign variables get none, and those of fixed sizes one.
    """
    if not isinstance(warmup, (list, tuple)) or not all(map(_is_sizes, warmup)):
        raise InvalidArgumentTypeError(
            "warmup: expected a list of sizes.",
            got=f"warmup={warmup!r:.100}",
            write='warmup=[1, 8, 64], or warmup=[{"batch": 1, "length": 128}]',
        )
    found: dict[str, Requests] = {}
    for key, info in signatures.items():
        if warmup and not info.assigns:
            example = next(iter(examples.get(key, ())), {})
            each = (_sizes_of(entry, key, info) for entry in warmup)
            found[key] = {_label_of(sizes): _request_inputs(info, sizes, example) for sizes in each}
    if (count := sum(map(len, found.values()))) > _MOST or (warmup and not found):
        raise InvalidArgumentError(
            f"TensorFlow Serving takes 1 to {_MOST} requests of signatures without side effects.",
            got=f"{count} requests",
            write="fewer sizes" if found else "no warmup=",
        )
    return found


def _is_sizes(entry: object) -> bool:
    numbers = entry.values() if isinstance(entry, Mapping) else (entry,)
    return all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers)


def _sizes_of(entry: int | Mapping[str, int], key: str, info: SignatureInfo) -> dict[str, int]:
    """The symbolic sizes of a signature."""
    every = itertools.chain.from_iterable(each.shape for each in info.inputs)
    names = sorted(set(itertools.chain.from_iterable(map(dimensions.names, every))))
    sizes = dict(entry) if isinstance(entry, Mapping) else dict.fromkeys(names, entry)
    chosen = {name: sizes[name] for name in names if name in sizes}
    if len(chosen) < len(names) or (isinstance(entry, int) and len(names) > 1):
        example = ", ".join(f'"{name}": 8' for name in names)
        raise InvalidArgumentError(
            f"warmup: the signature has the sizes {', '.join(names)}.",
            where=key,
            got=f"warmup=[{entry!r}]",
            write=f"warmup=[{{{example}}}]",
        )
    broken = [text for text in info.constraints if not dimensions.holds(text, chosen)]
    if broken:
        raise InvalidArgumentError(
            f"warmup: a size violates {', '.join(broken)}.", where=key, got=f"warmup=[{entry!r}]"
        )
    return chosen


def _label_of(sizes: Mapping[str, int]) -> str:
    return dimensions.RandomCall(dict(sizes), {}).label


def _request_inputs(info: SignatureInfo, sizes: Mapping[str, int], example: Arrays) -> Arrays:
    arrays = {}
    for each in info.inputs:
        shape, dtype = dimensions.shape(each.shape, sizes), numpy_dtype(each.dtype)
        first = example.get(each.name)
        empty = np.full(shape, b"", dtype) if each.dtype == "string" else np.zeros(shape, dtype)
        arrays[each.name] = empty if first is None or not first.size else np.resize(first, shape)
    return arrays


def write_requests(directory: Path, requests: Mapping[str, Requests]) -> None:
    if not requests:
        return
    file = directory / WARMUP_REQUESTS
    file.parent.mkdir()
    with file.open("wb") as out:
        for record in _encode_requests(requests):
            length = len(record).to_bytes(8, "little")
            for piece in (length, record):
                out.write(piece)
                out.write(masked_crc32c(piece).to_bytes(4, "little"))


def _encode_requests(requests: Mapping[str, Requests]) -> Iterator[bytes]:
    for key, calls in requests.items():
        for inputs in calls.values():
            tensors = {name: _encode_tensor(value) for name, value in inputs.items()}
            request = {"model_spec": {"signature_name": key}, "inputs": tensors}
            yield _LOG.encode({"predict_log": {"request": request}})


def _encode_tensor(value: np.ndarray) -> dict[str, Any]:
    spec = Spec.of(value)
    message: dict[str, Any] = {"dtype": spec.dtype, "tensor_shape": spec.shape}
    if value.dtype == object:
        return message | {"string_val": value.ravel().tolist()}
    return message | ({"tensor_content": value.tobytes()} if value.any() else {})
