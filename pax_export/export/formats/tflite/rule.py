"""The interface of a rule: one primitive in TFLite operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pax_export.export.formats.tflite import tensors
from pax_export.export.formats.tflite.tensors import TfliteSizes
from pax_export.export.portable import RuleTable

#: Called with an `Operation` and its operands; each returns the result, or a list of results. The
#: options: `thin` rules take thin operands, others are broadcast first; `stored` ones take weights
#: as stored, others are cast to their carriers.
RULES = RuleTable()
rule = RULES.rule


@dataclass(frozen=True)
class Operation:
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
    return getattr(struct.dtype, "name", str(struct.dtype))
