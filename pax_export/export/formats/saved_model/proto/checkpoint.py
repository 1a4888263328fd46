"""The values of variables, as a checkpoint of TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export.export.formats.saved_model.proto.objects import checkpoint_key
from pax_export.export.formats.tf_functions import tensorflow
from pax_export.export.lowering.variables import Variable

#: The name under which TensorFlow looks for the objects.
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
#: A file of a checkpoint holds about so many bytes, or one larger variable.
#: What TensorFlow cannot take over as it is, is copied for one file at a time.
FILE_BYTES = 32 << 20

#: What numpy and TensorFlow both know, and hand on without a copy.
_SHARED = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))


def write_checkpoint(directory: Path, variables: Sequence[Variable], objects: bytes) -> None:
    """Writes the files of a checkpoint called ``variables``.

    Args:
        directory: where to, which is there.
        variables: all of them.
        objects: see `write_checkpoint_objects`.
    """
    tf = tensorflow("to_saved_model")
    named: list[tuple[str, Any]] = [(checkpoint_key(each.name), each.value) for each in variables]
    parts = list(_parts([*named, (_OBJECTS, objects)]))
    prefixes = [str(directory / "parts" / f"part-{number}") for number in range(len(parts))]
    for prefix, part in zip(prefixes, parts):
        _write_part(prefix, part)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=prefixes, destination_prefix=str(directory / "variables")
    )


def _write_part(prefix: str, part: Sequence[tuple[str, Any]]) -> None:
    tf = tensorflow("to_saved_model")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[name for name, _ in part],
        shape_and_slices=[""] * len(part),
        tensors=[_tensor(tf, value) for _, value in part],
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
