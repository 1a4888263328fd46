"""The program in a file of a runtime, as data: what TFLite and ONNX have in common."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Shapes have few numbers; what has more is no shape.
LONGEST = 64


@dataclass(frozen=True)
class Fact:
    """What is known of an array.

    Attributes:
        shape: numbers, symbols of jax, None for a size that nobody knows; None if not even
            their count is known.
        dtype: as numpy calls it.
        value: of few whole numbers themselves, as objects; a symbol may be among them.
        zero: whether it is a constant 0.
        margin: of an array that zeros were put around, how many before and behind by axis.
    """

    shape: tuple[Any, ...] | None = None
    dtype: str = ""
    value: np.ndarray | None = None
    zero: bool = False
    margin: tuple[tuple[int, int], ...] = ()


@dataclass
class Operation:
    """One operation; an operand that was left out is None."""

    name: str
    operands: list[Hashable | None]
    results: list[Hashable]
    attributes: dict[str, Any] = field(default_factory=dict)
    bodies: dict[str, Graph] = field(default_factory=dict)


@dataclass
class Graph:
    """Operations in their order; `facts` has constants, and shapes that the file tells."""

    inputs: list[Hashable] = field(default_factory=list)
    outputs: list[Hashable] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    facts: dict[Hashable, Fact] = field(default_factory=dict)


@dataclass
class Program:
    """What a signature runs.

    Attributes:
        inputs: which array an input of the signature is, by its name.
    """

    graph: Graph
    inputs: Mapping[str, Hashable]


def numbers(content: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Few whole numbers, as objects; None for what cannot be a shape."""
    if content.dtype.kind not in "iub" or content.size > LONGEST or content.size != np.prod(shape):
        return None
    return content.astype(object).reshape(shape)
