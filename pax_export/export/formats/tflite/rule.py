"""The interface of a rule: one primitive in TFLite operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pax_export.export.formats.tflite import tensors
from pax_export.export.formats.tflite.tensors import TfliteSizes


class NotInTfliteError(Exception):
    """Raised by a rule for what it cannot say; the message ends a sentence about the operation."""


@dataclass(frozen=True)
class Rule:
    function: Callable[..., Any]
    thin: bool  # takes operands as they are; others have all dimensions written out
    stored: bool  # takes weights as the model has them; others in the dtype that carries theirs
    when: Callable[[Any], bool] | None = None  # for which equations it is; for all, unless given


RULES: dict[str, Rule] = {}


def rule(
    *names: str,
    thin: bool = False,
    stored: bool = False,
    when: Callable[[Any], bool] | None = None,
) -> Callable[[Callable], Callable]:
    """Makes a function the rule of the operations with these names.

    It is called with an `Operation` and its operands, and gives the result, or a list of them.
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
    #: Runs a function of jax, traced for such arrays, here: `call(function, structs, operands)`.
    call: Callable[[Callable, Sequence[Any], Sequence[Any]], list[Any]]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of the first result."""
        return self.results[0].shape

    @property
    def dtype(self) -> str:
        """Of the first operand."""
        return kind(self.operands[0])

    def reshape(self, tensor: object, shape: Sequence[Any]) -> Any:
        return tensors.reshape(tensor, shape, self.sizes)

    def full(self, tensor: object, shape: Sequence[Any]) -> Any:
        return tensors.full(tensor, shape, self.sizes)


def kind(struct: Any) -> str:
    """The name of a dtype."""
    return getattr(struct.dtype, "name", str(struct.dtype))
