"""Converts a traced program to ONNX operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._jaxpr import inner_programs, interpret, needed_equations, wrapped_program
from pax_export.export.formats.onnx.graph import GraphBuilder
from pax_export.export.formats.onnx.registry import RULES, Refused
from pax_export.export.formats.onnx.values import Value, carrier, is_number
from pax_export.export.portable import NotDecomposedError, NotWrittenError, not_decomposed
from pax_export.export.portable.arithmetic import MOVES, computed_equation


class Converter:
    """Writes programs of jax with a `GraphBuilder`; `constants` has the stored arrays by `id`."""

    def __init__(self, onnx: Any, opset: int, constants: Mapping[int, Value], exact: bool = True):
        self.builder = GraphBuilder(onnx, opset, self.inline, exact)
        self._constants = constants
        self._callers: list[Any] = []

    def inline(self, program: Any, arguments: Sequence[Value]) -> list[Any]:
        """Writes the operators of a program; returns its results."""
        told: Any = {"constant": self._constant, "equations": needed_equations}
        return interpret(program, arguments, self._written, **told)

    def _constant(self, value: Any) -> Value:
        found = self._constants.get(id(value))
        return self.builder.literal(value) if found is None else found

    def _written(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        self._callers.append(equation)
        try:
            name = equation.primitive.name
            inner = None if name in RULES else wrapped_program(equation)
            if inner is not None:
                return self.inline(inner, operands)
            self.builder.operation = name
            return _by_rule(self.builder, equation, operands)
        except NotWrittenError:
            raise
        except (Refused, NotDecomposedError) as error:
            raise NotWrittenError(str(error), equation, self._callers[:-1]) from error
        except Exception as error:  # any exception of a rule for an unsupported case
            reason = f"{type(error).__name__}: {error}"
            raise NotWrittenError(reason, equation, self._callers[:-1]) from error
        finally:
            self._callers.pop()


@dataclasses.dataclass(frozen=True)
class ResultStruct:
    """The shape and dtype of a rule's result."""

    shape: tuple[Any, ...]
    dtype: Any


def _by_rule(builder: GraphBuilder, equation: Any, operands: Sequence[Any]) -> list[Value]:
    name, parameters = equation.primitive.name, equation.params
    results = [ResultStruct(tuple(var.aval.shape), var.aval.dtype) for var in equation.outvars]
    if name not in RULES:
        raise Refused(not_decomposed(equation))
    if _is_known(equation, operands, results):
        found = computed_equation(equation, [x.known.astype(x.dtype) for x in operands])
        return [builder.literal(np.asarray(each)) for each in found]
    return _values(RULES[name](builder, results, *operands, **parameters), results)


#: Constants larger than this, and than their operands, are computed when the file runs.
_SMALL = 64


def _is_known(equation: Any, operands: Sequence[Value], results: Sequence[ResultStruct]) -> bool:
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


def _values(made: Any, results: Sequence[ResultStruct]) -> list[Any]:
    """Returns a rule's results as values with jax's shapes and dtypes."""
    several = made if isinstance(made, (list, tuple)) else [made]
    values: list[Value] = []
    for each, result in zip(several, results, strict=True):
        if isinstance(each, Value):
            shaped = {"dtype": np.dtype(result.dtype), "shape": result.shape}
            values.append(dataclasses.replace(each, **shaped))
        else:
            values.append(Value(each, np.dtype(result.dtype), result.shape))
    return values
