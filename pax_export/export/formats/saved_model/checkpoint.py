"""The variables of a SavedModel on disk: written, and compared with what they must be.

To be compared they are read piece by piece, and never held as a whole: a check of a model
that fills half of the memory must not need the other half.

A checkpoint is an index, a sorted table of names, and files of bytes.  The
index is a table of LevelDB: blocks of entries, whose keys leave out what they
share with the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ValidationError
from pax_export._optional import require
from pax_export.export.formats.saved_model.proto.objects import checkpoint_key
from pax_export.export.formats.tf_functions import tensorflow
from pax_export.export.lowering.variables import Variable

_PIECE = 1 << 20
_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"


def compare(directory: Path, expected: Mapping[str, Any]) -> None:
    """Compares the variables under ``leaves`` of a SavedModel with arrays by name, bit by bit."""
    prefix = directory / "variables" / "variables"
    try:
        entries = dict(_entries(prefix.with_name("variables.index").read_bytes()))
        keys = _keys(prefix)
        wrong = [
            name for name, array in expected.items() if _differs(prefix, entries[keys[name]], array)
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


def _differs(prefix: Path, entry: Any, expected: Any) -> bool:
    array = np.asarray(expected)
    if (entry.size, [each.size for each in entry.shape.dim]) != (array.nbytes, list(array.shape)):
        return True
    # A view where the array lies in one piece, as those of jax do.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    shards = len(list(prefix.parent.glob(f"{prefix.name}.data-*")))
    name = f"{prefix.name}.data-{entry.shard_id:05d}-of-{shards:05d}"
    with prefix.with_name(name).open("rb") as file:
        file.seek(entry.offset)
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            if file.read(len(piece)) != piece.tobytes():
                return True
    return False


def _keys(prefix: Path) -> dict[str, str]:
    """The key in the checkpoint of each variable, by its name under ``leaves``."""
    checkpoint = require("tensorflow.train", "tensorflow", "to_saved_model")
    graphs = require(
        "tensorflow.core.protobuf.trackable_object_graph_pb2", "tensorflow", "to_saved_model"
    )
    graph = graphs.TrackableObjectGraph()
    graph.ParseFromString(checkpoint.load_checkpoint(str(prefix)).get_tensor(_OBJECTS))

    def children(node: Any) -> dict[str, Any]:
        return {child.local_name: graph.nodes[child.node_id] for child in node.children}

    leaves = children(graph.nodes[0]).get("leaves")
    named = children(leaves) if leaves else {}
    return {name: node.attributes[0].checkpoint_key for name, node in named.items()}


def _entries(data: bytes) -> Iterator[tuple[str, Any]]:
    """The entries of a checkpoint's index: where each tensor lies."""
    bundle = require("tensorflow.core.protobuf.tensor_bundle_pb2", "tensorflow", "to_saved_model")
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise ValueError("the index is damaged")
    footer = data[-_FOOTER:]
    _, at = _number(footer, 0)
    _, at = _number(footer, at)
    for _, handle in _block(data, *_pair(footer, at)):
        for key, value in _block(data, *_pair(handle, 0)):
            if key:  # the first one is a header
                entry = bundle.BundleEntryProto()
                entry.ParseFromString(value)
                yield key.decode(), entry


def _pair(data: bytes, at: int) -> tuple[int, int]:
    offset, at = _number(data, at)
    return offset, _number(data, at)[0]


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    if data[offset + size] != 0:
        raise ValueError("the index is compressed")
    block = data[offset : offset + size]
    restarts = int.from_bytes(block[-4:], "little")
    at, end, key = 0, len(block) - 4 * (restarts + 1), b""
    while at < end:
        shared, at = _number(block, at)
        own, at = _number(block, at)
        length, at = _number(block, at)
        key = key[:shared] + block[at : at + own]
        at += own
        yield key, block[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number in seven bits a byte, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at


#: A file of a checkpoint holds about so many bytes, or one larger variable.
#: What TensorFlow cannot take over as it is, is copied for one file at a time.
FILE_BYTES = 32 << 20

#: What numpy and TensorFlow both know, and hand on without a copy.
_SHARED = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))


def write_checkpoint(directory: Path, variables: Sequence[Variable], objects: bytes) -> None:
    """Writes a checkpoint called ``variables``; `objects` is made by `write_checkpoint_objects`."""
    tf = tensorflow("to_saved_model")
    named: list[tuple[str, Any]] = [(checkpoint_key(each.name), each.value) for each in variables]
    parts = list(_parts([*named, (_OBJECTS, objects)]))
    prefixes = [str(directory / "parts" / f"part-{number}") for number in range(len(parts))]
    for prefix, part in zip(prefixes, parts):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[name for name, _ in part],
            shape_and_slices=[""] * len(part),
            tensors=[_tensor(tf, value) for _, value in part],
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=prefixes, destination_prefix=str(directory / "variables")
    )


def _tensor(tf: Any, value: Any) -> Any:
    """A tensor of the value, if possible in the same memory.

    TensorFlow takes over arrays of jax by itself, but copies those of numpy, and
    keeps a second copy of each that is larger than all before.
    """
    if isinstance(value, np.ndarray) and value.dtype in _SHARED:
        if value.flags.c_contiguous and value.flags.writeable:  # else there is no capsule
            return tf.experimental.dlpack.from_dlpack(value.__dlpack__())
    return tf.convert_to_tensor(value)


def _parts(named: Sequence[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    part: list[tuple[str, Any]] = []
    held = 0
    for name, value in named:
        size = getattr(value, "nbytes", len(value) if isinstance(value, bytes) else 0)
        if part and held + size > FILE_BYTES:
            yield part
            part, held = [], 0
        part.append((name, value))
        held += size
    yield part
