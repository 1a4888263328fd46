"""One function of an export, as every writer gets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pax_export.export.artifact.report import ArrayInfo
from pax_export.export.lowering.lower import Lowered
from pax_export.export.tracing.spec import Inputs
from pax_export.export.tracing.traced import Traced


@dataclass(frozen=True)
class Signature:
    """One function of a SavedModel."""

    key: str
    input_names: tuple[str, ...]
    input_structs: tuple[jax.ShapeDtypeStruct, ...]
    output_names: tuple[str, ...]
    forward: Call
    assigned: tuple[int, ...]  # the variables that take the results after the outputs
    gradient: Gradient | None
    processing: Processing | None = None  # what stands around it

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Its gradient, and the gradient of that."""
        first = self.gradient
        return tuple(each for each in (first, first and first.next) if each is not None)


@dataclass(frozen=True)
class Call:
    """A module, and where its operands are: variables by place, then the inputs, then constants."""

    lowered: Lowered
    variables: tuple[int, ...]
    constants: tuple[int, ...]  # the variables that hold its constants


@dataclass(frozen=True)
class Gradient:
    """A module that takes all operands of the forward one and cotangents of `of`.

    It gives the cotangents of the operands `wrt`.  `next` is its own gradient.
    """

    call: Call
    wrt: tuple[int, ...]
    of: tuple[int, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]  # of its operands
    next: Gradient | None = None


@dataclass(frozen=True)
class Pullback:
    """The gradient of a program, traced."""

    traced: Traced
    wrt: tuple[int, ...]  # operands of the program
    of: tuple[int, ...]  # its results


@dataclass(frozen=True)
class Processing:
    """TensorFlow functions around a signature; the outer signature that they make of it."""

    inputs: Inputs
    outputs: tuple[ArrayInfo, ...]
    structure: dict[str, Any]  # of the outputs, nested
    preprocess: Any  # a tf.function of the outer inputs that gives those of the model, in order
    postprocess: Any  # a tf.function of the model's outputs, in order, that gives the outer ones
    trackables: tuple[Any, ...]  # what they hold
