"""The interface of a rule: one primitive in TFLite operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pax_export.export.formats.tflite import tensors
from pax_export.export.formats.tflite.tensors import TfliteSizes


class NotInTfliteError(Exception):
    """Raised by a rule for unsupported cases; the message completes a sentence on the operation."""


@dataclass(frozen=True)
class Rule:
    function: Callable[..., Any]
    thin: bool  # takes thin operands; others are broadcast first
    stored: bool  # takes stored weights; others are cast to their carriers
    when: Callable[[Any], bool] | None = None  # for which equations it is; for all, unless given


RULES: dict[str, Rule] = {}


def rule(
    *names: str,
    thin: bool = False,
    stored: bool = False,
    when: Callable[[Any], bool] | None = None,
) -> Callable[[Callable], Callable]:
    """Registers a function as the rule of the operations with these names.

    It is called with an `Operation` and its operands, and returns the result, or a list of results.
    """

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, Rule(function, thin, stored, when)))
        return function

    return register


@dataclass(frozen=True)
class Operation:
    """One operation of a traced program."""

    name: str
    params: Any
    operands: Sequence[Any]  # their shapes and dtypes
    results: Sequence[Any]
    sizes: TfliteSizes
    #: Runs a traced program with these operands here: `run(program, operands)`.
    run: Callable[[Any, Sequence[Any]], list[Any]]
    #: Traces a function of jax and converts it here: `call(function, structs, operands)`.
    call: Callable[[Callable, Sequence[Any], Sequence[Any]], list[Any]]

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the first result."""
        return self.results[0].shape

    @property
    def dtype(self) -> str:
        """The dtype of the first operand."""
        return kind(self.operands[0])

    def reshape(self, tensor: object, shape: Sequence[Any]) -> Any:
        return tensors.reshape(tensor, shape, self.sizes)

    def full(self, tensor: object, shape: Sequence[Any]) -> Any:
        return tensors.full(tensor, shape, self.sizes)


def kind(struct: Any) -> str:
    """The name of a dtype."""
    return getattr(struct.dtype, "name", str(struct.dtype))
