"""Loaded single-file exports, called with the runtime of their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pax_export.export.artifact.arguments import Arguments, default_of
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import rebuild

#: Calls the function with this key on named arrays; gives the outputs by name.
Run = Callable[[str, dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class LoadedFile:
    """A loaded TFLite or ONNX model, called like the model that was exported.

    Folders for browsers hold ONNX models, too.
    It runs in LiteRT or onnxruntime, on the CPU, and so neither under `jax.jit`
    nor under `jax.grad`.  Outputs are jax arrays if an argument is one, and
    numpy arrays otherwise.

    Threads may call it at once: onnxruntime makes such calls side by side, LiteRT
    one after the other.

    Args:
        report: of the export.
        runtime: what users may ask for more than calls; None for nothing.
        run: calls a signature: its key and numpy arrays by input name give arrays by output
            name.  A format of another package makes a `LoadedFile` of its own by it.

    Attributes:
        report: what the export is.
        signatures: by key, functions like the model itself.
        runtime: LiteRT's `Interpreter`, or onnxruntime's `InferenceSession`, of a folder
            one for each signature.  The former is for one thread, and for no call of the
            model meanwhile.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = folder + "/linear.tflite"
        ...     report = pax.export.to_tflite(pax.Linear(3, 2), path, pax.export.spec("1, 3"))
        ...     model = pax.export.load(path)
        >>> model
        LoadedFile(Linear: serving_default)
        >>> model.signatures["serving_default"]([[1, 2, 3]]).shape
        (1, 2)
    """

    def __init__(self, report: Report, runtime: object, run: Run):
        self.report = report
        self.runtime = runtime
        self.signatures = {
            key: FileSignature(key, info, run) for key, info in report.signatures.items()
        }

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the default signature, or the only one.

        Raises:
            InvalidArgumentError: the arguments have another structure, dtype or
                shape than the exported ones.
        """
        return default_of(self.signatures)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LoadedFile({self.report.model}: {', '.join(self.signatures)})"


class FileSignature:
    """One function of a `LoadedFile`."""

    def __init__(self, key: str, info: SignatureInfo, run: Run):
        self.key = key
        self.info = info
        self._run = run
        self._arguments = Arguments(key, info)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the exported function; see `LoadedFile`."""
        named = self._arguments.named(args, kwargs)
        in_jax = any(isinstance(value, jax.Array) for value in named.values())
        arrays = {name: self._arguments.array(name, value) for name, value in named.items()}
        shapes = {name: value.shape for name, value in arrays.items()}
        empty = any(0 in shape for shape in shapes.values())
        outputs = self._arguments.empty_outputs(shapes) if empty else None
        if outputs is None:
            # These runtimes read beyond what they are given, or give nonsense, if a size is wrong.
            self._arguments.check_shapes(shapes)
            outputs = self._run(self.key, arrays)
        convert = jax.numpy.asarray if in_jax else np.asarray
        return rebuild(self.info.result, lambda name: convert(outputs[name]))
