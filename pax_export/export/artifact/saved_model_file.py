"""``saved_model.pb``, read as data: nothing of it is loaded or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pax_export._errors import ExportPathError
from pax_export._optional import require

NAME = "saved_model.pb"


def read(directory: Path, purpose: str) -> Any:
    """The protocol buffer of a SavedModel, with one graph at least.

    Args:
        directory: of the SavedModel.
        purpose: what needs it; part of the message if TensorFlow is missing.
    """
    file = directory / NAME
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ExportPathError(
            "There is no SavedModel here.",
            where=str(directory),
            got=f"no file {NAME}" if isinstance(error, FileNotFoundError) else str(error),
            write=f"a directory that holds {NAME}, as tf.saved_model.save writes it",
        ) from error
    model = require("tensorflow.core.protobuf.saved_model_pb2", "tensorflow", purpose).SavedModel()
    try:
        model.ParseFromString(data)
        if not model.meta_graphs:
            raise ValueError("there is no graph in it")
    except Exception as error:  # of protobuf, whose classes differ between its versions
        raise ExportPathError(
            "The SavedModel cannot be read.",
            where=str(file),
            got=f"{type(error).__name__}: {error}",
            write=f"the {NAME} as it was written",
        ) from error
    return model
