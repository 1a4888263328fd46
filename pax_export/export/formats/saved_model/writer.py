"""Writes a SavedModel: variables, one concrete function per signature, and warm-up requests.

A checkpoint is an index, which is a sorted table of names, and a data file. Arrays are written one
by one and compared in pieces, because a model may fill half of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations import wire
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ValidationError,
)
from pax_export._foundations.types import ArrayLike
from pax_export._foundations.wire import (
    Map,
    Memory,
    SavedTensor,
    Schema,
    encode_varint,
    masked_crc32c,
    table_entries,
    write_table,
)
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.dimensions import numpy_dtype
from pax_export.export.artifact.formats import WARMUP_REQUESTS
from pax_export.export.artifact.report import SignatureInfo
from pax_export.export.formats.saved_model.proto import messages
from pax_export.export.formats.saved_model.proto.functions import SignatureWriter, write_initializer
from pax_export.export.formats.saved_model.proto.messages import (
    STRING,
    TENSOR,
    Message,
    Spec,
    shape,
)
from pax_export.export.formats.saved_model.proto.objects import (
    checkpoint_key,
    meta_graph,
    saved_objects,
    tracked_objects,
)
from pax_export.export.lowering.lower import Call, Signature
from pax_export.export.lowering.variables import Store, Variable
from pax_export.export.validation.serve import Arrays

_PIECE = 1 << 20
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def write_checkpoint(directory: Path, variables: Sequence[Variable], objects: bytes) -> None:
    """Writes a checkpoint named ``variables``; `objects` is the result of `tracked_objects`."""
    header = {"num_shards": 1, "version": {"producer": 1}}
    entries = {b"": messages.BUNDLE_HEADER.encode(header)}
    with (directory / "variables.data-00000-of-00001").open("wb") as file:

        def add(key: str, spec: Spec, content: bytes | memoryview, crc: int | None = None) -> None:
            crc = masked_crc32c(content) if crc is None else crc
            about = {"offset": file.tell(), "size": file.write(content), "crc32c": crc}
            entries[key.encode()] = messages.BUNDLE_ENTRY.encode({**spec._asdict(), **about})

        for each in variables:
            add(checkpoint_key(each.name), Spec.of(each.value), _raw_bytes(each.value).data)
        # Strings are stored as their lengths, a checksum of these, and their bytes.
        length = len(objects).to_bytes(4, "little")
        begin = masked_crc32c(length).to_bytes(4, "little")
        crc = masked_crc32c(length + begin + objects)
        add(_OBJECTS, Spec(STRING, shape([])), encode_varint(len(objects)) + begin + objects, crc)
    (directory / "variables.index").write_bytes(write_table(entries))


def _raw_bytes(value: ArrayLike) -> np.ndarray:
    """The bytes of an array: a view if it is contiguous, as those of jax are."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def compare(directory: Path, expected: Mapping[str, Any]) -> None:
    """Compares the variables under ``leaves`` of a SavedModel with arrays by name, bit by bit."""
    prefix = directory / "variables" / "variables"
    try:
        index = Memory(prefix.with_name("variables.index").read_bytes())
        entries = {key.decode(): wire.Message(Memory(value)) for key, value in table_entries(index)}
        wrong = [
            name
            for name, array in expected.items()
            if _variable_differs(prefix, SavedTensor(entries[checkpoint_key(name)]), array)
        ]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValidationError(
            "The variables that were written cannot be read.",
            where=str(prefix),
            got=f"{type(error).__name__}: {error}"[:500],
        ) from error
    if wrong:
        raise ValidationError(
            "A variable of the exported model differs from the model's.", where=", ".join(wrong)
        )


def _variable_differs(prefix: Path, saved: SavedTensor, expected: ArrayLike) -> bool:
    array = np.asarray(expected)
    if (saved.size, saved.shape) != (array.nbytes, list(array.shape)):
        return True
    flat = _raw_bytes(array)
    shards = len(list(prefix.parent.glob(f"{prefix.name}.data-*")))
    name = f"{prefix.name}.data-{saved.shard:05d}-of-{shards:05d}"
    with prefix.with_name(name).open("rb") as file:
        file.seek(saved.offset)
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            if file.read(len(piece)) != piece.tobytes():
                return True
    return False


def write(
    directory: Path, store: Store, signatures: Sequence[Signature], initializer: Call | None
) -> None:
    library: Message = {"function": [], "registered_gradients": []}
    functions = {each.key: SignatureWriter(library, each, store).write() for each in signatures}
    first = () if initializer is None else write_initializer(library, initializer, store)
    objects = saved_objects(store.variables, functions, first)
    graph = meta_graph(library, store.variables, functions, first) | {"object_graph_def": objects}
    folder = directory / "variables"
    folder.mkdir()
    write_checkpoint(folder, store.stored, tracked_objects(store.variables, objects))
    model = {"saved_model_schema_version": 1, "meta_graphs": [graph]}
    with (directory / "saved_model.pb").open("wb") as file:
        file.writelines(messages.SAVED_MODEL.pieces(model))


# --- requests that TensorFlow Serving answers before it serves: ``warmup=[1, 8, 64]`` ------------

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
            found[key] = {
                dimensions.RandomCall(sizes, {}).label: _request_inputs(info, sizes, example)
                for sizes in each
            }
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
    every = (size for each in info.inputs for size in each.shape)
    names = sorted({name for size in every for name in dimensions.names(size)})
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


def _request_inputs(info: SignatureInfo, sizes: Mapping[str, int], example: Arrays) -> Arrays:
    arrays = {}
    for each in info.inputs:
        known, dtype = dimensions.shape(each.shape, sizes), numpy_dtype(each.dtype)
        first = example.get(each.name)
        empty = np.full(known, b"", dtype) if each.dtype == "string" else np.zeros(known, dtype)
        arrays[each.name] = empty if first is None or not first.size else np.resize(first, known)
    return arrays


def write_requests(directory: Path, requests: Mapping[str, Requests]) -> None:
    """Writes a TFRecord file; TensorFlow fills tensors up that have dtype and shape only."""
    if not requests:
        return
    file = directory / WARMUP_REQUESTS
    file.parent.mkdir()
    calls = ((key, inputs) for key, found in requests.items() for inputs in found.values())
    with file.open("wb") as out:
        for key, inputs in calls:
            tensors = {name: _encode_tensor(value) for name, value in inputs.items()}
            request = {"model_spec": {"signature_name": key}, "inputs": tensors}
            record = _LOG.encode({"predict_log": {"request": request}})
            for piece in (len(record).to_bytes(8, "little"), record):
                out.write(piece + masked_crc32c(piece).to_bytes(4, "little"))


def _encode_tensor(value: np.ndarray) -> dict[str, Any]:
    spec = Spec.of(value)
    message: dict[str, Any] = {"dtype": spec.dtype, "tensor_shape": spec.shape}
    if value.dtype == object:
        return message | {"string_val": value.ravel().tolist()}
    return message | ({"tensor_content": value.tobytes()} if value.any() else {})
