"""Calls of a loaded function that pass by TensorFlow's reading of arguments.

Of a call of a small signature, some 150 of 200 µs go into finding out which
argument is which, whether its shape fits, and who wants a gradient, and into
handing the work over to another thread.  An operation that calls a function,
`tf.raw_ops.StatefulPartitionedCall`, does none of this: it takes all tensors
in order, the variables among them, and runs the function where it stands.

So this is for calls that are like one before, which TensorFlow has read and
found good, and only where nobody can tell the difference:

- nothing records gradients: the operation has none;
- nothing is traced: a function that is saved should hold a call that TensorFlow
  can differentiate;
- there is one device, and no strategy to spread variables over several: then
  there is nothing to place;
- the function changes no variable: the operation runs what its results need,
  and leaves the rest out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pax_export.export.artifact.report import SignatureInfo


class DirectCall:
    """The fast way to call a loaded function, for calls like earlier ones."""

    def __init__(self, tf: Any, function: Any):
        """Prepares calls of a signature of a SavedModel, which takes and gives tensors by name."""
        outputs = function.structured_outputs
        # The order in which TensorFlow keeps what has names.
        self._inputs = sorted(function.structured_input_signature[1])
        self._outputs = sorted(outputs)
        self._variables = list(function.captured_inputs)
        self._run = functools.partial(
            tf.raw_ops.StatefulPartitionedCall,
            Tout=[outputs[name].dtype for name in self._outputs],
            f=function,
        )
        self._eager = tf.executing_eagerly
        self._recording = _recording()
        self._types = {np.ndarray, type(tf.constant(0))}
        self._known: set[tuple[Any, ...]] = set()

    def kind(self, named: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What this call, with a tensor or array by name, shares with those that are like it.

        It is None if the call must go TensorFlow's way, whatever was called before.
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

    def knows(self, kind: tuple[Any, ...] | None) -> bool:
        """Whether TensorFlow has taken a call of this kind."""
        return kind in self._known

    def learn(self, kind: tuple[Any, ...] | None) -> None:
        """Notes that TensorFlow has taken a call of this kind."""
        if kind is not None:
            self._known.add(kind)

    def __call__(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the function; only for a known kind."""
        given = [named[name] for name in self._inputs]
        return dict(zip(self._outputs, self._run(args=given + self._variables)))


def direct_call(tf: Any, function: Any, info: SignatureInfo) -> DirectCall | None:
    """The fast way to call a function, or None where there can be none.

    It is to be asked right after loading, where strategies are in force.
    """
    one_device = len(tf.config.list_logical_devices()) == 1 and not tf.distribute.has_strategy()
    # Functions of TensorFlow around a model may do anything, and gain from several threads.
    alone = info.preprocess is None and info.postprocess is None
    pure = alone and not info.assigns
    return DirectCall(tf, function) if one_device and pure and tf.executing_eagerly() else None


def _recording() -> Callable[[], bool]:
    """What says whether a tape or an accumulator may record what is called now.

    TensorFlow has no public name for this.  Where it loses the one that all its
    releases from 2.15 to 2.21 have, all calls go its own way.
    """
    try:
        return importlib.import_module("tensorflow.python.eager.record").could_possibly_record
    except (ImportError, AttributeError):
        return lambda: True
