"""One function of an export, as every writer gets it."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pax_export.export._lowering import Lowered


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


@dataclass(frozen=True)
class Call:
    """A module, and where its operands are: variables by place, then the inputs, then constants."""

    lowered: Lowered
    variables: tuple[int, ...]
    constants: tuple[int, ...]  # the variables that hold its constants


@dataclass(frozen=True)
class Gradient:
    """A module that takes all operands of the forward one and cotangents of `of`.

    It gives the cotangents of the operands `wrt`.
    """

    call: Call
    wrt: tuple[int, ...]
    of: tuple[int, ...]
