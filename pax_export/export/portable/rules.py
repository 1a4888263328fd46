"""The table of rules of a target, and the conversion of programs by it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from pax_export._foundations.jaxpr import interpret, needed_equations, wrapped_program
from pax_export._foundations.types import Equation, TracedProgram
from pax_export.export.portable import kept
from pax_export.export.portable.decompose import (
    decompose,
    decomposed,
    not_decomposed,
    third_party_implementation,
)
from pax_export.export.portable.decompositions import NotDecomposedError
from pax_export.export.portable.decompositions.ordering import has_order
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


class ProgramConverter:
    """Converts programs operation by operation; calls are inlined.

    Args:
        rules: the rules of the target.
        constant: returns the value of a constant or literal.
        by_rule: ``by_rule(rule, equation, operands)`` returns the results of an equation, or None.
        exact: write NaN as in jax.
    """

    def __init__(
        self,
        rules: RuleTable,
        constant: Callable[[Any], Any],
        by_rule: Callable[[Rule, Any, list[Any]], Sequence[Any] | None],
        exact: bool,
    ):
        self._rules, self._constant, self._by_rule = rules, constant, by_rule
        self._has = partial(rules.has, exact=exact)
        self._callers: list[Any] = []  # the equations being converted, the outermost first

    @property
    def source(self) -> tuple[Any, ...]:
        """The equation that is being converted, after its callers."""
        return tuple(self._callers)

    def write(self, program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of any program, in operations that the target has; see `convert`."""
        real = in_real_numbers(program, self._rules.has_complex)
        return self.convert(decompose(real, self._has), operands)

    def call(
        self, function: Callable[..., Any], structs: Sequence[Any], operands: Sequence[Any]
    ) -> list[Any]:
        """Returns the results of a function of jax, traced for these shapes and dtypes."""
        return self.convert(decompose(trace(function, structs, {}), self._has), operands)

    def convert(self, program: TracedProgram, operands: Sequence[Any]) -> list[Any]:
        """Returns the results of a program of operations of the target.

        Raises:
            NotWrittenError: for an operation without a rule, or whose rule does not support it.
        """
        options: Any = {"constant": self._constant, "equations": needed_equations}
        return interpret(program, operands, self._convert_equation, **options)

    def _convert_equation(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        self._callers.append(equation)
        try:
            found = None
            if third_party_implementation(equation) is None:  # else a name may be one of jax's
                found = self._rules.get(kept.operation(equation)[0])
            # Loops may be nested deeper than `decompose` follows operations into themselves.
            if found is not None and (found.when is None or found.when(equation)):
                results = self._by_rule(found, equation, operands)
                if results is not None:
                    return results
            inner = wrapped_program(equation)
            if inner is None and found is not None:
                inner = decompose(decomposed(equation), self._has)
            if inner is None:
                raise NotInTargetError(not_decomposed(equation))
            return self.convert(inner, operands)
        except NotWrittenError:
            raise
        except (NotInTargetError, NotDecomposedError) as error:
            raise NotWrittenError(str(error), equation, self._callers[:-1]) from error
        except Exception as error:  # any exception of a rule for an unsupported case
            reason = f"{type(error).__name__}: {error}"
            raise NotWrittenError(reason, equation, self._callers[:-1]) from error
        finally:
            self._callers.pop()
