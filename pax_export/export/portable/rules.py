"""The table of rules of a target, and the conversion of programs by it."""

from __future__ import annotations

import abc
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np

from pax_export._foundations.jaxpr import (
    inner_programs,
    interpret,
    needed_equations,
    wrapped_program,
)
from pax_export._foundations.types import ArrayLike, Aval, Equation, TracedProgram
from pax_export.export.portable import kept
from pax_export.export.portable.arithmetic import MOVES, computed_equation
from pax_export.export.portable.decompositions import (
    NotDecomposedError,
    decompose,
    decomposed,
    not_decomposed,
    third_party_implementation,
)
from pax_export.export.portable.decompositions.reductions import has_order
from pax_export.export.portable.program import is_static
from pax_export.export.portable.real_numbers import NotWrittenError, in_real_numbers
from pax_export.export.portable.sizes import trace

#: Operations whose results have the numbers of operands, or whose rules round by themselves.
EXACT = frozenset(
    "max min select_n reshape transpose squeeze broadcast_in_dim concatenate slice tile split pad "
    "rev window put_window take take_along extreme rank while scan cond convert_element_type and "
    "or xor reduce_precision reduce_window_max bitcast_convert_type iota floor ceil round "
    "sign".split()
)


class NotInTargetError(Exception):
    """Raised by a rule for unsupported cases; the message completes a sentence on the operation."""


@dataclass(frozen=True)
class Rule:
    """A function that writes a primitive, or a kept function, as operators of a target.

    Attributes:
        function: the function; its operands are those of the format.  It returns None where the
            target only has the definition or decomposition.
        when: the condition for equations of the rule; None for all.
        options: options of the format.
    """

    function: Callable[..., Any]
    when: Callable[[Any], bool] | None = None
    options: Mapping[str, bool] = field(default_factory=dict)


class RuleTable(dict[str, Rule]):
    """The rules of a target, by the name of the primitive or kept function."""

    def rule(
        self, *names: str, when: Callable[[Any], bool] | None = None, **options: bool
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function as the rule of these primitives, for all equations or for some."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.update(dict.fromkeys(names, Rule(function, when, options)))
            return function

        return register

    def load(self, package: ModuleType) -> None:
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")

    def has_complex(self, equation: Equation) -> bool:
        """Whether a rule writes an equation of complex numbers, on their parts."""
        found = self.get(f"complex_{equation.primitive.name}")
        return found is not None and (found.when is None or found.when(equation))

    def has(self, equation: Equation, exact: bool = False) -> bool:
        """Whether a rule writes an equation; if `exact`, with NaN as in jax."""
        found = self.get(equation.primitive.name)
        if found is None or not has_order(equation):
            return False
        if exact and equation.primitive.name == "reduce_window_max":  # whose kernels skip NaN
            return False
        return found.when is None or found.when(equation)


class GraphValue(Protocol):
    """An array of a graph; `known` are the numbers of a literal, as the graph has them."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def known(self) -> np.ndarray | None: ...


V = TypeVar("V", bound=GraphValue)


class ProgramConverter(abc.ABC, Generic[V]):
    """Writes programs as a graph of a format, operation by operation; calls are inlined.

    The graph of a format is a subclass, which is passed to the rules.

    Args:
        rules: the rules of the format.
        exact: write NaN as in jax.

    Attributes:
        operation: what is being written.
        results: its shapes and dtypes.
        folds: whether operations on literals are evaluated, if they are of integers or moves.
    """

    folds = True

    def __init__(self, rules: RuleTable, exact: bool = False):
        self.operation = ""
        self.results: Sequence[Aval] = ()
        self._rules = rules
        self._has = partial(rules.has, exact=exact)
        self._callers: list[Equation] = []  # those being converted, the outermost first

    @abc.abstractmethod
    def constant_value(self, value: ArrayLike) -> V:
        """The value of a constant or literal."""

    @abc.abstractmethod
    def rule_value(self, output: Any, struct: Aval, rounds: bool) -> V:
        """The value of what a rule returned as one of its results; computed numbers are rounded."""

    @property
    def source(self) -> tuple[Equation, ...]:
        """The equation that is being converted, after its callers."""
        return tuple(self._callers)

    def write(self, program: TracedProgram, operands: Sequence[V]) -> list[V]:
        """Returns the results of any program, in operations that the target has; see `inline`."""
        real = in_real_numbers(program, self._rules.has_complex)
        return self.inline(decompose(real, self._has), operands)

    def call(
        self, function: Callable[..., Any], structs: Sequence[Any], operands: Sequence[V]
    ) -> list[V]:
        """Returns the results of a function of jax, traced for these shapes and dtypes."""
        return self.inline(decompose(trace(function, structs, {}), self._has), operands)

    def inline(self, program: TracedProgram, operands: Sequence[V]) -> list[V]:
        """Returns the results of a program of operations of the target.

        Raises:
            NotWrittenError: for an operation without a rule, or whose rule does not support it.
        """
        options: Any = {"constant": self.constant_value, "equations": needed_equations}
        return interpret(program, operands, self._convert_equation, **options)

    def apply_rule(self, rule: Rule, equation: Equation, operands: Sequence[V]) -> list[V] | None:
        """Returns the results of an equation by its rule; None where that has none for it."""
        self.operation, params = kept.operation(equation)
        self.results = results = [variable.aval for variable in equation.outvars]
        if self.folds and _is_known(equation, operands):
            arrays = [np.asarray(x.known).astype(x.dtype) for x in operands]
            found = computed_equation(equation, arrays)
            return [self.constant_value(np.asarray(each)) for each in found]
        rounds = self.operation not in EXACT
        outputs = rule.function(self, *operands, **params)
        if outputs is None:
            return None
        several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        pairs = zip(several, results, strict=True)
        return [self.rule_value(each, struct, rounds) for each, struct in pairs]

    def _convert_equation(self, equation: Equation, operands: list[V]) -> Sequence[V]:
        self._callers.append(equation)
        try:
            found = None
            if third_party_implementation(equation) is None:  # else a name may be one of jax's
                found = self._rules.get(kept.operation(equation)[0])
            # Loops may be nested deeper than `decompose` follows operations into themselves.
            if found is not None and (found.when is None or found.when(equation)):
                results = self.apply_rule(found, equation, operands)
                if results is not None:
                    return results
            inner = wrapped_program(equation)
            if inner is None and found is not None:
                inner = decompose(decomposed(equation), self._has)
            if inner is None:
                raise NotInTargetError(not_decomposed(equation))
            return self.inline(inner, operands)
        except NotWrittenError:
            raise
        except (NotInTargetError, NotDecomposedError) as error:
            raise NotWrittenError(str(error), equation, self._callers[:-1]) from error
        except Exception as error:  # any exception of a rule for an unsupported case
            reason = f"{type(error).__name__}: {error}"
            raise NotWrittenError(reason, equation, self._callers[:-1]) from error
        finally:
            self._callers.pop()


#: Results of more elements than this, and than the operands, are computed when a program runs.
_FEW = 64


def _is_known(equation: Equation, operands: Sequence[GraphValue]) -> bool:
    """Whether a converter evaluates an equation: its results are integers, or moved literals."""
    literals = [each.known for each in operands if each.known is not None]
    if not operands or len(literals) < len(operands):
        return False
    results = [each.aval for each in equation.outvars]
    is_float = (jnp.issubdtype(each.dtype, jnp.floating) for each in (*operands, *results))
    if equation.primitive.name not in MOVES and any(is_float):
        return False
    if equation.effects or any(True for _ in inner_programs(equation)):
        return False
    most = max(_FEW, *map(np.size, literals))
    return all(is_static(each.shape) and math.prod(each.shape) <= most for each in results)
