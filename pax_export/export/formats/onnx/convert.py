"""Converts a traced program to ONNX operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pax_export._jaxpr import is_literal, wrapped_program
from pax_export.export.formats.onnx.graph import Writer, flat, together
from pax_export.export.formats.onnx.keys import keys_of_words, words_of_keys
from pax_export.export.formats.onnx.registry import (
    BY_ORDER,
    COMPLEX_RULES,
    PART_BY_PART,
    RULES,
    Refused,
    has,
)
from pax_export.export.formats.onnx.values import (
    AnyValue,
    Parts,
    Value,
    carrier,
    is_complex,
    is_key,
    is_number,
    part_dtype,
)
from pax_export.export.portable import NotDecomposedError, decompose, not_decomposed
from pax_export.export.portable.complex_numbers import COMPLEX, on_pairs
from pax_export.export.portable.random_keys import KEYS, on_words


class NotInOnnxError(Exception):
    """An operation cannot be written; `equation` is it, and `callers` what it stands in."""

    def __init__(self, reason: str, equation: Any, callers: Sequence[Any]):
        super().__init__(reason)
        self.reason = reason
        self.equation = equation
        self.callers = tuple(callers)


class Converter:
    """Writes programs of jax with a `Writer`; `constants` has the stored arrays by `id`."""

    def __init__(
        self, onnx: Any, opset: int, constants: Mapping[int, AnyValue], exact: bool = True
    ):
        self.writer = Writer(onnx, opset, self.inline, exact)
        self._constants = constants
        self._callers: list[Any] = []

    def inline(
        self, program: Any, arguments: Sequence[AnyValue], wanted: Collection[int] | None = None
    ) -> list[Any]:
        """Writes a program; gives its results, None for those that are not wanted."""
        jaxpr = getattr(program, "jaxpr", program)
        constants = [self._constant(value) for value in getattr(program, "consts", ())]
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

        def read(atom: Any) -> Any:
            return self.writer.literal(atom.val) if is_literal(atom) else values.get(atom)

        wished = range(len(jaxpr.outvars)) if wanted is None else wanted
        for equation, used in _needed(jaxpr, wished):
            operands = [read(atom) for atom in equation.invars]
            values.update(zip(equation.outvars, self._written(equation, operands, used)))
        return [read(atom) if i in wished else None for i, atom in enumerate(jaxpr.outvars)]

    def _results(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, writer = equation.primitive.name, self.writer
        results = [variable.aval for variable in equation.outvars]
        if name in KEYS:
            words = [words_of_keys(writer, x) if is_key(x.dtype) else x for x in operands]
            (made,) = self.inline(decompose(on_words(equation), has), words)
            is_made = is_key(results[0].dtype)
            return [keys_of_words(writer, made, results[0].dtype) if is_made else made]
        if name in COMPLEX and _has_complex(equation) and not has(equation):
            names = self.inline(decompose(on_pairs(equation), has), flat(operands))
            return together(results, [each.name for each in names])
        return _by_rule(writer, equation, operands)

    def _constant(self, value: Any) -> AnyValue:
        found = self._constants.get(id(value))
        return self.writer.literal(value) if found is None else found

    def _written(self, equation: Any, operands: list[Any], used: Collection[int]) -> list[Any]:
        self._callers.append(equation)
        try:
            name = equation.primitive.name
            inner = None if name in RULES or name in COMPLEX_RULES else wrapped_program(equation)
            if inner is not None:
                return self.inline(inner, operands, used)
            self.writer.operation = name
            return self._results(equation, operands)
        except NotInOnnxError:
            raise
        except (Refused, NotDecomposedError) as error:
            raise NotInOnnxError(str(error), equation, self._callers[:-1]) from error
        except Exception as error:  # a rule that meets what it does not know
            reason = f"{type(error).__name__}: {error}"
            raise NotInOnnxError(reason, equation, self._callers[:-1]) from error
        finally:
            self._callers.pop()


def _needed(jaxpr: Any, wished: Collection[int]) -> list[tuple[Any, list[int]]]:
    """The equations that the wished results need, each with the results that are used."""
    used = {jaxpr.outvars[i] for i in wished if not is_literal(jaxpr.outvars[i])}
    kept = []
    for equation in reversed(jaxpr.eqns):
        live = [index for index, var in enumerate(equation.outvars) if var in used]
        if live:
            used.update(atom for atom in equation.invars if not is_literal(atom))
            kept.append((equation, live))
    return kept[::-1]


def _has_complex(equation: Any) -> bool:
    return any(is_complex(atom.aval.dtype) for atom in (*equation.invars, *equation.outvars))


@dataclasses.dataclass(frozen=True)
class Result:
    """The shape and dtype of what a rule makes."""

    shape: tuple[Any, ...]
    dtype: Any


def _by_rule(writer: Writer, equation: Any, operands: Sequence[Any]) -> list[AnyValue]:
    name, parameters = equation.primitive.name, equation.params
    results = [Result(tuple(var.aval.shape), var.aval.dtype) for var in equation.outvars]
    in_parts = any(isinstance(each, Parts) for each in operands) or any(
        part_dtype(each.dtype) for each in results
    )
    if not in_parts:
        if results and all(0 in filter(is_number, each.shape) for each in results):
            zeros = [np.zeros((), carrier(each.dtype)) for each in results]
            names = [writer.expand(zero, each.shape) for zero, each in zip(zeros, results)]
            return _values(names, results)  # nothing is computed, and some kernels would fail
        if name not in RULES:
            raise Refused(not_decomposed(equation))
        if name in BY_ORDER and np.uint64 in [each.dtype for each in operands]:
            return _by_order(writer, equation, operands, results)
        return _values(RULES[name](writer, results, *operands, **parameters), results)
    if name in COMPLEX_RULES:
        return _values(COMPLEX_RULES[name](writer, results, *operands, **parameters), results)
    if name not in PART_BY_PART:
        raise Refused(f"of {_kind(operands, results)}")
    both = []
    for index in range(2):
        chosen = [each.parts[index] if isinstance(each, Parts) else each for each in operands]
        reals = [Result(each.shape, part_dtype(each.dtype) or each.dtype) for each in results]
        both.append(_values(RULES[name](writer, reals, *chosen, **parameters), reals))
    return [Parts((one, other), each.dtype) for one, other, each in zip(*both, results)]


def _by_order(
    writer: Writer, equation: Any, operands: Sequence[Value], results: Sequence[Result]
) -> list[Any]:
    """Numbers of uint64 as those of int64 that are in the same order: without the first bit."""
    first = np.array(np.iinfo(np.int64).min)

    def moved(value: Value, dtype: Any) -> Value:
        known = None if value.known is None else value.known ^ first
        return Value(writer("BitwiseXor", value, first), np.dtype(dtype), value.shape, known)

    given = [moved(x, np.int64) if x.dtype == np.uint64 else x for x in operands]
    wide = [Result(x.shape, np.int64) if x.dtype == np.uint64 else x for x in results]
    made = _values(RULES[equation.primitive.name](writer, wide, *given, **equation.params), wide)
    return [
        moved(one, np.uint64) if each.dtype == np.uint64 else one
        for one, each in zip(made, results)
    ]


def _values(made: Any, results: Sequence[Result]) -> list[Any]:
    """What a rule gave, as values of the shapes and dtypes that jax says."""
    several = made if isinstance(made, (list, tuple)) else [made]
    values: list[AnyValue] = []
    for each, result in zip(several, results, strict=True):
        if isinstance(each, Parts):
            values.append(each)
        elif isinstance(each, Value):
            shaped = {"dtype": np.dtype(result.dtype), "shape": result.shape}
            values.append(dataclasses.replace(each, **shaped))
        else:
            values.append(Value(each, np.dtype(result.dtype), result.shape))
    return values


def _kind(operands: Sequence[Any], results: Sequence[Result]) -> str:
    dtypes = [each.dtype for each in (*operands, *results) if part_dtype(each.dtype)]
    return f"{dtypes[0]} numbers"
