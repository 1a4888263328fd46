"""Writes a TFLite model with TensorFlow's converter, and reads it with LiteRT."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ExportPathError, UnsupportedOperationError
from pax_export._optional import require
from pax_export.export.artifact.report import Report
from pax_export.export.formats.loaded_file import LoadedFile
from pax_export.export.formats.saved_model.functions import make_function, make_variables
from pax_export.export.lowering.signature import Signature
from pax_export.export.lowering.variables import Store

_OPERATION = re.compile(r"\b(?:tf|stablehlo|mhlo|chlo|vhlo)\.(\w+)")


def litert(purpose: str) -> Any:
    """The runtime of TFLite models."""
    return require("ai_edge_litert.interpreter", "tflite", purpose)


def write(path: Path, store: Store, signatures: Sequence[Signature], quantize: str | None) -> None:
    """Converts signatures to one TFLite model, with nothing but built-in operations.

    Raises:
        UnsupportedOperationError: TFLite has no such operation or dtype.
    """
    tf = require("tensorflow", "tflite", "to_tflite")
    variables = make_variables(store)
    root = tf.Module()
    root.leaves = variables
    functions = {
        each.key: make_function(each, variables).get_concrete_function() for each in signatures
    }
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(root, folder, signatures=functions)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(functions))
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if quantize is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if quantize == "float16":
            converter.target_spec.supported_types = [tf.float16]
        try:
            content = converter.convert()
        except Exception as error:  # the converter has classes of its own for this
            raise _refused(error) from error
    path.write_bytes(content)


def _refused(error: Exception) -> UnsupportedOperationError:
    """Names the operations, out of a text of many lines of MLIR."""
    text = str(error)
    names = dict.fromkeys(
        name for name in _OPERATION.findall(text) if not name.startswith(("XlaCallModule", "func"))
    )
    return UnsupportedOperationError(
        "TFLite cannot express this model"
        + (f": it has no {', '.join(names)} like this." if names else "."),
        got=re.sub(r"\s+", " ", text)[:500],
        write="the same in other operations of jax.numpy and jax.lax, or float32 numbers; "
        "a size instead of a symbolic dimension; or another target, e.g. to_saved_model",
    )


def load(path: Path, report: Report) -> LoadedFile:
    """Reads a TFLite model.

    Raises:
        ExportPathError: it is none, or damaged.
    """
    try:
        interpreter = litert("load").Interpreter(model_path=str(path))
        runners = {key: interpreter.get_signature_runner(key) for key in report.signatures}
    except (ValueError, RuntimeError) as error:
        raise ExportPathError(
            "LiteRT cannot read this file.", where=str(path), got=str(error)[:500]
        ) from error

    def run(key: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # The arrays that it gives are its own, and change with the next call.
        return {name: np.array(value) for name, value in runners[key](**inputs).items()}

    return LoadedFile(report, interpreter, run)
