"""Exports as callables again: on numpy, jax and TensorFlow arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import ExportPathError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.export import _manifest
from pax_export.export._dtypes import numpy_dtype
from pax_export.export._exportable import DEFAULT
from pax_export.export._manifest import Report, SignatureInfo
from pax_export.export._structure import collect, rebuild
from pax_export.export.writers.saved_model import tensorflow


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
        self._default = self.signatures.get(DEFAULT)
        if self._default is None and len(self.signatures) == 1:
            (self._default,) = self.signatures.values()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the default signature, or the only one.

        Raises:
            InvalidArgumentError: there are several and none is the default, or
                the arguments have another structure than the exported ones.
        """
        if self._default is None:
            raise InvalidArgumentError(
                "This export has several signatures, and none is the default.",
                got=", ".join(self.signatures),
                write=f"model.signatures[{next(iter(self.signatures))!r}](...)",
            )
        return self._default(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LoadedModel({self.report.model}: {', '.join(self.signatures)})"


class LoadedSignature:
    """One function of a `LoadedModel`."""

    def __init__(self, key: str, function: Any, info: SignatureInfo):
        self.key = key
        self.info = info
        self._function = function
        self._tf = tensorflow("load")
        self._flat = self._names_of_flat_arguments()
        self._dtypes = {entry.name: numpy_dtype(entry.dtype) for entry in info.inputs}

    def _names_of_flat_arguments(self) -> tuple[str, ...] | None:
        """The input names, if every argument is one array that is given by position."""
        info = self.info
        trees = [info.arguments[name] for name in info.positional]
        flat = len(trees) == len(info.arguments) and all("leaf" in tree for tree in trees)
        return tuple(tree["leaf"] for tree in trees) if flat else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the exported function; see `LoadedModel`."""
        if self._flat is not None and len(args) == len(self._flat) and not kwargs:
            named = dict(zip(self._flat, args))  # the common case, and the fast one
        else:
            named = self._collect(args, kwargs)
        # Inside of a tf.function nothing has a value yet.
        eager = self._tf.executing_eagerly()
        convert: Callable[[Any], Any] = _to_numpy if eager else _unchanged
        for name, value in named.items():
            if self._tf.is_tensor(value):
                convert = _unchanged
                continue
            if convert is _to_numpy and isinstance(value, jax.Array):
                convert = _to_jax
            named[name] = self._tf.constant(self._array(name, value))
        try:
            outputs = self._function(**named)
        except (TypeError, ValueError, self._tf.errors.InvalidArgumentError) as error:
            self._explain({name: tuple(value.shape) for name, value in named.items()}, error)
            raise
        return rebuild(self.info.result, lambda name: convert(outputs[name]))

    def _explain(self, shapes: Mapping[str, tuple], cause: Exception) -> None:
        """Raises an error that names the input, if its shape is the cause of another."""
        sizes: dict[str, tuple[int, str]] = {}
        for entry in self.info.inputs:
            given = shapes[entry.name]
            wrong = len(given) != len(entry.shape)
            for size, dimension in zip(given, entry.shape):
                if isinstance(dimension, int):
                    wrong |= size != dimension
                elif dimension.isidentifier():  # an expression is TensorFlow's to check
                    first = sizes.setdefault(dimension, (size, entry.name))[0]
                    wrong |= size == 0 or size != first
            if wrong:
                known = (f"{name} = {size} by {source}" for name, (size, source) in sizes.items())
                raise InvalidArgumentError(
                    "An argument has another shape than the exported one.",
                    where=f"{self.key}: {entry.name}",
                    got=f"{list(given)}" + "".join(f", {text}" for text in known),
                    write=f"[{', '.join(map(str, entry.shape))}]",
                ) from cause

    def _array(self, name: str, value: Any) -> np.ndarray:
        """The value in the dtype of the input, if that changes no number."""
        dtype = self._dtypes[name]
        if not hasattr(value, "dtype"):
            return np.asarray(value, dtype)
        if value.dtype == dtype:
            return np.asarray(value)
        narrow = np.asarray(value).astype(dtype)
        # What jax does to 64-bit numbers, but never to other values in silence.
        if jax.dtypes.canonicalize_dtype(value.dtype) == dtype and (
            dtype.kind not in "iu" or np.array_equal(narrow, value)
        ):
            return narrow
        raise InvalidArgumentTypeError(
            "An argument has another dtype than the exported one.",
            where=f"{self.key}: {name}",
            got=str(value.dtype),
            write=dtype.name,
        )

    def _collect(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        info = self.info
        given = {**dict(zip(info.positional, args)), **kwargs}
        if len(args) > len(info.positional) or sorted(given) != sorted(info.arguments):
            raise InvalidArgumentError(
                "The exported model takes other arguments.",
                where=self.key,
                got=f"{len(args)} positional, keywords {sorted(kwargs)}",
                write=f"model({', '.join(info.arguments)})",
            )
        named: dict[str, Any] = {}
        for name, tree in info.arguments.items():
            collect(tree, given[name], named, name)
        return named


def _unchanged(tensor: Any) -> Any:
    return tensor


def _to_numpy(tensor: Any) -> np.ndarray:
    return tensor.numpy()


def _to_jax(tensor: Any) -> jax.Array:
    return jax.numpy.asarray(tensor.numpy())


def load(path: str | os.PathLike[str]) -> LoadedModel:
    """Loads what `to_saved_model` wrote.

    Args:
        path: the directory of the export.

    Returns:
        A callable like the exported model.  No code of the export is run.

    Raises:
        ExportPathError: there is no export, or it cannot be read.
        MissingPackageError: TensorFlow is not installed.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from pax_export.export import load, spec, to_saved_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     double = ({"w": jnp.full(3, 2.0)}, lambda params, x: params["w"] * x)
        ...     report = to_saved_model(double, folder + "/double", spec("batch, 3"))
        ...     doubled = load(folder + "/double")
        >>> doubled([[1, 2, 3]]).tolist()
        [[2.0, 4.0, 6.0]]
    """
    tf = tensorflow("load")
    report = _manifest.read(path)
    try:
        return LoadedModel(tf.saved_model.load(os.fspath(path)), report)
    except (OSError, ValueError, KeyError, AttributeError, tf.errors.OpError) as error:
        raise ExportPathError(
            "The export cannot be loaded: files are missing or damaged.",
            where=str(path),
            got=f"{type(error).__name__}: {error}"[:500],
            write="the directory as to_saved_model wrote it",
        ) from error
