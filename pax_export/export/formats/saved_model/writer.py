"""Writes a SavedModel: variables, and one concrete function per signature.

A checkpoint is an index, which is a sorted table of names, and a data file. Arrays are written one
by one and compared in pieces, because a model may fill half of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations import wire
from pax_export._foundations.errors import ValidationError
from pax_export._foundations.wire import (
    Memory,
    SavedTensor,
    encode_varint,
    masked_crc32c,
    table_entries,
    write_table,
)
from pax_export.export.formats.saved_model.proto import schemas
from pax_export.export.formats.saved_model.proto.functions import SignatureWriter, write_initializer
from pax_export.export.formats.saved_model.proto.nodes import STRING, Message, Spec, shape
from pax_export.export.formats.saved_model.proto.objects import (
    checkpoint_key,
    meta_graph,
    saved_objects,
    tracked_objects,
)
from pax_export.export.lowering.lower import Call, Signature
from pax_export.export.lowering.variables import Store, Variable

_PIECE = 1 << 20
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def write_checkpoint(directory: Path, variables: Sequence[Variable], objects: bytes) -> None:
    """Writes a checkpoint named ``variables``; `objects` is the result of `tracked_objects`."""
    header = {"num_shards": 1, "version": {"producer": 1}}
    entries = {b"": schemas.BUNDLE_HEADER.encode(header)}
    with (directory / "variables.data-00000-of-00001").open("wb") as file:

        def add(key: str, spec: Spec, content: Any, crc: int | None = None) -> None:
            crc = masked_crc32c(content) if crc is None else crc
            about = {"offset": file.tell(), "size": file.write(content), "crc32c": crc}
            entries[key.encode()] = schemas.BUNDLE_ENTRY.encode({**spec._asdict(), **about})

        for each in variables:
            add(checkpoint_key(each.name), Spec.of(each.value), _raw_bytes(each.value).data)
        # Strings are stored as their lengths, a checksum of these, and their bytes.
        length = len(objects).to_bytes(4, "little")
        begin = masked_crc32c(length).to_bytes(4, "little")
        crc = masked_crc32c(length + begin + objects)
        add(_OBJECTS, Spec(STRING, shape([])), encode_varint(len(objects)) + begin + objects, crc)
    (directory / "variables.index").write_bytes(write_table(entries))


def _raw_bytes(value: object) -> np.ndarray:
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


def _variable_differs(prefix: Path, saved: SavedTensor, expected: object) -> bool:
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


# --- Writes a SavedModel: variables, and one concrete function per signature ---


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
        file.writelines(schemas.SAVED_MODEL.pieces(model))
