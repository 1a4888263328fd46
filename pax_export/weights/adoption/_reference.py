"""Compares candidate assignments by their outputs for a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._types import PyTree
from pax_export.core import Module, pure

#: How far the outputs may be from the reference, in parts of the largest.
TOLERANCE = 1e-4


class Reference:
    """Inputs, and what the net that wrote the weights makes of them.

    Args:
        given: ``(inputs, outputs)``, or ``(inputs, outputs, call)`` with a function that gets the
            module in eval mode and the inputs.
        tolerance: how far outputs may be apart.
    """

    def __init__(self, given: object, tolerance: float):
        if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
            raise InvalidArgumentTypeError(
                "A reference has inputs and outputs.",
                where="adopt(reference=)",
                got=f"{type(given).__name__}: {given!r}"[:200],
                write="reference=(inputs, outputs), or (inputs, outputs, call) with "
                "call(net, *inputs)",
            )
        inputs, self.outputs, *call = given
        self.inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        self._call: Callable = call[0] if call else _called
        self._tolerance = tolerance
        self._run: Callable = jax.jit(self._ran)

    def _ran(self, net: Module, inputs: tuple) -> Any:
        return pure(self._call)(net, *inputs)

    def distance(self, net: Module) -> float:
        """How far the outputs of a module are from the reference, in parts of the largest."""
        module = net.eval() if isinstance(net, Module) else net
        try:
            found = self._run(module, self.inputs)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            self._run = self._ran  # a call that looks at values is run as it is written
            found = self._run(module, self.inputs)
        outputs = jax.tree_util.tree_leaves(found)
        expected = jax.tree_util.tree_leaves(self.outputs)
        shapes = [np.shape(each) for each in outputs], [np.shape(each) for each in expected]
        if shapes[0] != shapes[1]:
            raise InvalidArgumentError(
                "The module gives outputs of other shapes than the reference.",
                where="adopt(reference=)",
                got=f"{shapes[0]} instead of {shapes[1]}",
                write="the outputs of one call, or (inputs, outputs, call)",
            )
        return max((_apart(*pair) for pair in zip(outputs, expected)), default=np.inf)

    def agrees(self, distance: float) -> bool:
        """Whether outputs so far apart are the same."""
        return distance <= self._tolerance


def _called(net: Module, *inputs: PyTree) -> Any:
    return net(*inputs)


def _apart(one: object, other: object) -> float:
    one, other = (np.asarray(each).astype(np.float64) for each in (one, other))
    scale = np.abs(other).max(initial=0.0)
    apart = np.abs(one - other).max(initial=0.0)
    if not np.isfinite(apart):
        return np.inf
    return float(apart / scale) if scale else float(apart)
