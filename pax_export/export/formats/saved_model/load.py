"""A SavedModel as a callable again: on numpy, jax and TensorFlow arrays."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ExportPathError
from pax_export._optional import require
from pax_export.export.artifact.arguments import Arguments, default_of, is_of_jax
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.saved_model.direct_call import direct_call


class LoadedModel:
    """An export that has been loaded; call it like the model that was exported.

    Positional and keyword arguments, nested arguments and outputs are those of
    the model.  Outputs are TensorFlow tensors if an argument is one, jax arrays
    if one is of jax, and numpy arrays otherwise.

    Attributes:
        report: what the export is.
        signatures: by key, functions like the model itself.
        variables: the stored arrays as `tf.Variable`, by name.
        trainable_variables: those that training changes.
        root: what `tf.saved_model.load` gave.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pax.export.to_saved_model(
        ...         pax.Linear(3, 2), folder + "/linear", pax.export.spec("batch, 3")
        ...     )
        ...     model = pax.export.load(folder + "/linear")
        >>> model
        LoadedModel(Linear: serving_default)
        >>> model.signatures["serving_default"]([[1, 2, 3]]).shape
        (1, 2)
    """

    def __init__(self, root: Any, report: Report):
        self.root = root
        self.report = report
        self.variables: dict[str, Any] = dict(root.leaves)
        self.trainable_variables: list[Any] = list(root.trainable_variables)
        self.signatures = {
            key: LoadedSignature(key, root.signatures[key], info)
            for key, info in report.signatures.items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the default signature, or the only one.

        Raises:
            InvalidArgumentError: there are several and none is the default, or
                the arguments have another structure than the exported ones.
        """
        return default_of(self.signatures)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LoadedModel({self.report.model}: {', '.join(self.signatures)})"


class LoadedSignature:
    """One function of a `LoadedModel`."""

    def __init__(self, key: str, function: Any, info: SignatureInfo):
        self.key = key
        self.info = info
        self._function = function
        self._tf = require("tensorflow", "tensorflow", "load")
        self._arguments = Arguments(key, info)
        self._direct = direct_call(self._tf, function, info)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the exported function; see `LoadedModel`."""
        named = self._arguments.named(args, kwargs)
        convert = self._prepare(named)
        outputs = self._call(named)
        return rebuild(self.info.result, lambda name: convert(outputs[name]))

    def _prepare(self, named: dict[str, Any]) -> Callable[[Any], Any]:
        """Makes tensors and arrays of numpy of all inputs; gives what converts the outputs."""
        # Inside of a tf.function nothing has a value yet.
        convert: Callable[[Any], Any] = _to_numpy if self._tf.executing_eagerly() else _unchanged
        for name, value in named.items():
            if is_of_jax(value):
                convert = _to_jax if convert is _to_numpy else convert
            elif not isinstance(value, np.ndarray) and self._tf.is_tensor(value):
                convert = _unchanged
                continue
            named[name] = self._arguments.array(name, value)
        return convert

    def _call(self, named: Mapping[str, Any]) -> Any:
        kind = self._direct and self._direct.kind(named)
        if self._direct and self._direct.knows(kind):
            return self._direct(named)
        tf = self._tf
        tensors = {
            name: tf.constant(value) if isinstance(value, np.ndarray) else value
            for name, value in named.items()
        }
        try:
            outputs = self._function(**tensors)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            self._arguments.check_dtypes({n: t.dtype.name for n, t in tensors.items()}, error)
            self._arguments.check_shapes({n: tuple(t.shape) for n, t in tensors.items()}, error)
            raise
        if self._direct:
            self._direct.learn(kind)
        return outputs


def _unchanged(tensor: Any) -> Any:
    return tensor


def _to_numpy(tensor: Any) -> np.ndarray:
    return tensor.numpy()


def _to_jax(tensor: Any) -> Any:
    value = tensor.numpy()
    as_jax = importlib.import_module("jax.numpy").asarray
    return value if tensor.dtype.name == "string" else as_jax(value)


def load(path: Path, report: Report) -> LoadedModel:
    """Reads a SavedModel."""
    tf = require("tensorflow", "tensorflow", "load")
    try:
        return LoadedModel(tf.saved_model.load(os.fspath(path)), report)
    except (OSError, ValueError, KeyError, AttributeError, tf.errors.OpError) as error:
        raise ExportPathError(
            "The export cannot be loaded: files are missing or damaged.",
            where=str(path),
            got=f"{type(error).__name__}: {error}"[:500],
            write="the directory as to_saved_model wrote it",
        ) from error
