"""Loads a SavedModel as a callable on numpy, jax and TensorFlow arrays."""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from pax_export._foundations.optional import require
from pax_export.export.artifact.calling import (
    Arguments,
    default_of,
    is_of_jax,
    tensorflow_keyword,
)
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import rebuild


class OutputTensor(Protocol):
    """A tensor of TensorFlow, which has no types."""

    @property
    def dtype(self) -> Any: ...
    def numpy(self) -> np.ndarray: ...


class LoadedModel:
    """A loaded SavedModel; call it like the exported model.

    Positional and keyword arguments, nested arguments and outputs are those of
    the model.  Outputs are TensorFlow tensors if an argument is one, jax arrays
    if one is of jax, and numpy arrays otherwise.

    It is thread-safe. Calls of a signature that assigns variables (a training step,
    ``state="update"``) are serialized, so that none sees partial state.

    Attributes:
        report: the report of the export.
        signatures: by key, functions like the model itself.
        variables: the stored arrays as `tf.Variable`, by name.
        trainable_variables: the trainable ones.
        root: the result of `tf.saved_model.load`.

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
        changes = any(info.assigns for info in report.signatures.values())
        in_turn = threading.RLock() if changes else nullcontext()
        self.signatures = {
            key: LoadedSignature(key, root.signatures[key], info, in_turn, report.platforms)
            for key, info in report.signatures.items()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the default signature, or the only one.

        Raises:
            InvalidArgumentError: there are several signatures without a default, or the structure
                of the arguments differs.
        """
        return default_of(self.signatures)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"LoadedModel({self.report.model}: {', '.join(self.signatures)})"


class LoadedSignature:
    """One function of a `LoadedModel`; its calls share a context."""

    def __init__(
        self,
        key: str,
        function: Any,
        info: SignatureInfo,
        in_turn: AbstractContextManager[Any],
        platforms: Sequence[str],
    ):
        self._in_turn = in_turn
        self._platforms = platforms
        self.key = key
        self.info = info
        self._function = function
        self._tf = require("tensorflow", "tensorflow", "load")
        self._arguments = Arguments(key, info)
        self._direct = direct_call(self._tf, function, info)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the exported function; see `LoadedModel`."""
        named = self._arguments.named(args, kwargs)
        convert = self._prepare_inputs(named)
        with self._in_turn:
            outputs = self._call_function(named)
        return rebuild(self.info.result, lambda name: convert(outputs[name]))

    def _prepare_inputs(self, named: dict[str, Any]) -> Callable[[Any], Any]:
        """Converts all inputs to tensors and numpy arrays; returns the converter of the outputs."""
        # In a tf.function tensors have no values.
        convert: Callable[[Any], Any] = _to_numpy if self._tf.executing_eagerly() else _keep_tensor
        for name, value in named.items():
            if is_of_jax(value):
                convert = _to_jax if convert is _to_numpy else convert
            elif not isinstance(value, np.ndarray) and self._tf.is_tensor(value):
                convert = _keep_tensor
                continue
            named[name] = self._arguments.array(name, value)
        return convert

    def _call_function(self, named: Mapping[str, Any]) -> Any:
        kind = self._direct and self._direct.kind(named)
        if self._direct and kind in self._direct.known:
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
            shapes = {n: tuple(t.shape) for n, t in tensors.items()}
            empty = self._arguments.empty_outputs(shapes)
            if empty is not None:  # written by an older version of ours
                return {name: tf.constant(value) for name, value in empty.items()}
            self._arguments.check_shapes(shapes, error)
            raise
        except tf.errors.NotFoundError as error:
            if not tf.config.list_logical_devices("GPU"):
                self._arguments.check_platform("cpu", self._platforms, error)
            raise
        if self._direct and kind is not None:
            self._direct.known.add(kind)
        return outputs


def _keep_tensor(tensor: OutputTensor) -> OutputTensor:
    return tensor


def _to_numpy(tensor: OutputTensor) -> np.ndarray:
    return tensor.numpy()


def _to_jax(tensor: OutputTensor) -> Any:
    value = tensor.numpy()
    is_text = tensor.dtype.name == "string"
    return value if is_text else importlib.import_module("jax.numpy").asarray(value)


def load(path: Path, report: Report) -> LoadedModel:
    tf = require("tensorflow", "tensorflow", "load")
    return LoadedModel(tf.saved_model.load(os.fspath(path)), report)


class DirectCall:
    """A fast call of a loaded function, without TensorFlow's argument processing.

    In a call of a small signature, some 150 of 200 µs are spent on matching arguments, checking
    shapes, looking for gradient tapes, and switching threads. `tf.raw_ops.StatefulPartitionedCall`
    does none of this: it takes all tensors in order, including the variables, and runs the function
    in place.

    So it is used for calls similar to an earlier one that TensorFlow has accepted, and only if the
    difference is not observable:

    - no gradients are recorded: the operation has none;
    - nothing is traced: a saved function should contain a call that TensorFlow can differentiate;
    - there is one device, and no distribution strategy;
    - the function changes no variable: the operation runs only what its results need.
    """

    def __init__(self, tf: ModuleType, function: Any):
        """Prepares calls of a signature of a SavedModel, with tensors by name."""
        outputs = function.structured_outputs
        # TensorFlow's order of named arguments.
        self._inputs = sorted(function.structured_input_signature[1], key=tensorflow_keyword)
        self._outputs = sorted(outputs)
        self._variables = list(function.captured_inputs)
        self._run = functools.partial(
            tf.raw_ops.StatefulPartitionedCall,
            Tout=[outputs[name].dtype for name in self._outputs],
            f=function,
        )
        self._eager = tf.executing_eagerly
        self._recording = _find_recording()
        self._types = {np.ndarray, type(tf.constant(0))}
        self.known: set[tuple[Any, ...]] = set()

    def kind(self, named: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Returns the key of this call's type, from tensors or arrays by name.

        It is None if the call must use TensorFlow's own path.
        """
        if not self._eager() or self._recording():
            return None
        kind: list[Any] = []
        for name in self._inputs:
            value = named[name]
            if type(value) not in self._types:
                return None
            kind += (value.dtype, value.shape)
        return tuple(kind)

    def __call__(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the function; only for a known type of call."""
        inputs = [named[name] for name in self._inputs]
        return dict(zip(self._outputs, self._run(args=inputs + self._variables)))


def direct_call(tf: ModuleType, function: Any, info: SignatureInfo) -> DirectCall | None:
    """The fast way to call a function, or None where there can be none.

    It is to be asked right after loading, where strategies are in force.
    """
    one_device = len(tf.config.list_logical_devices()) == 1 and not tf.distribute.has_strategy()
    # Functions of TensorFlow around a model may do anything, and gain from several threads.
    alone = info.preprocess is None and info.postprocess is None
    pure = alone and not info.assigns
    return DirectCall(tf, function) if one_device and pure and tf.executing_eagerly() else None


def _find_recording() -> Callable[[], bool]:
    """Returns the functions that report whether a tape or an accumulator may record a call.

    TensorFlow has no public API for this. If a release lacks the names of 2.15 to 2.21, all calls
    use TensorFlow's own path.
    """
    try:
        return importlib.import_module("tensorflow.python.eager.record").could_possibly_record
    except (ImportError, AttributeError):
        return lambda: True
