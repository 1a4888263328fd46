"""Converts a traced program to ONNX operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._jaxpr import inner_programs
from pax_export.export.formats.onnx.graph import RULES, GraphBuilder
from pax_export.export.formats.onnx.values import Value, carrier, is_number
from pax_export.export.portable import EXACT, ProgramConverter, Rule, kept
from pax_export.export.portable.arithmetic import MOVES, computed_equation


class Converter:
    """Writes programs of jax with a `GraphBuilder`; `constants` has the stored arrays by `id`."""

    def __init__(self, onnx: Any, opset: int, constants: Mapping[int, Value], exact: bool = True):
        converter = ProgramConverter(RULES, self._constant, self._by_rule, exact)
        self.write = converter.write
        self.builder = GraphBuilder(onnx, opset, converter.convert, exact)
        self._constants = constants

    def _constant(self, value: Any) -> Value:
        found = self._constants.get(id(value))
        return self.builder.literal(value) if found is None else found

    def _by_rule(self, rule: Rule, equation: Any, operands: Sequence[Any]) -> list[Value] | None:
        results = [variable.aval for variable in equation.outvars]
        self.builder.operation, told = kept.operation(equation)
        self.builder.results = results
        if _is_known(equation, operands, results):
            found = computed_equation(equation, [x.known.astype(x.dtype) for x in operands])
            return [self.builder.literal(np.asarray(each)) for each in found]
        rounds = self.builder.operation not in EXACT
        made = rule.function(self.builder, *operands, **told)
        return None if made is None else self._values(made, results, rounds)

    def _values(self, made: Any, results: Sequence[Any], rounds: bool) -> list[Value]:
        several = made if isinstance(made, (list, tuple)) else [made]
        values: list[Value] = []
        for each, result in zip(several, results, strict=True):
            shaped: dict[str, Any] = {"dtype": np.dtype(result.dtype), "shape": tuple(result.shape)}
            if isinstance(each, Value):
                values.append(dataclasses.replace(each, **shaped))
            else:
                name = self.builder.fit(each, result.dtype) if rounds else each
                values.append(Value(name, **shaped))
        return values


#: Constants larger than this, and than their operands, are computed when the file runs.
_SMALL = 64


def _is_known(equation: Any, operands: Sequence[Value], results: Sequence[Any]) -> bool:
    """Returns whether results are known integers, by literals of the program."""
    given = [each.known for each in operands if each.known is not None]
    if not operands or len(given) < len(operands):
        return False
    carriers = {each.carrier for each in operands} | {carrier(each.dtype) for each in results}
    if equation.primitive.name not in MOVES and any(each.kind == "f" for each in carriers):
        return False
    if equation.effects or any(True for _ in inner_programs(equation)):
        return False
    most = max(_SMALL, *map(np.size, given))
    return all(
        all(map(is_number, each.shape)) and math.prod(each.shape) <= most for each in results
    )
