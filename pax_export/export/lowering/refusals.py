"""Converts jax's lowering errors: operation, location and reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pax_export._foundations.errors import (
    PaxError,
    SymbolicDimensionError,
    UnsupportedOperationError,
    first_line,
)
from pax_export._foundations.jax import equations_of
from pax_export._foundations.jaxpr import inner_programs
from pax_export._foundations.types import Equation
from pax_export.export.artifact import dimensions
from pax_export.export.portable import NotDecomposedError
from pax_export.export.tracing.source_lines import attach_operations


@contextmanager
def named_refusals() -> Iterator[None]:
    """Context manager that converts lowering errors to ours, with the operation and its line.

    Raises:
        SymbolicDimensionError: it has a symbolic size that jax must know.
        UnsupportedOperationError: jax cannot lower it.
    """
    try:
        yield
    except PaxError:
        raise
    except Exception as error:  # of jax or of a rule; raised again if it names no operation
        equations = equations_of(error)
        if not equations and "Cannot solve for values of dimension" in str(error):
            found = re.search(r"Unprocessed specifications: '(.*?)'", str(error))
            raise SymbolicDimensionError(
                "jax cannot compute a symbolic dimension from the sizes of the inputs.",
                got=found[1] if found else first_line(error),
                write="a size of one dimension alone, e.g. 'n' or '2*n'",
            ) from error
        if not equations:
            raise
        raise _refusal(equations, error) from error


def _refusal(equations: list[Any], error: Exception) -> PaxError:
    calls = [next(inner_programs(each), None) is not None for each in equations]
    index = calls.index(False) if False in calls else len(calls) - 1
    chain = equations[: index + 1]
    name = equations[index].primitive.name
    symbolic = _symbolic_dimensions(equations[index])
    if not _speaks_of(symbolic, error):
        reason, write = _reason(error), "the same in other operations of jax.numpy and jax.lax"
        refusal = UnsupportedOperationError(
            f"jax cannot export the operation {name}: {reason}.",
            write=f"{write}{_of_platforms(str(error))}",
        )
        return attach_operations(refusal, [chain])
    names = ", ".join(symbolic)
    refusal = SymbolicDimensionError(
        f"The operation {name} needs sizes that are known: {_reason(error)}.",
        got=f"the symbolic dimension {names}",
        write=f"a number instead of {symbolic[0]!r} in its spec; or operations that work for "
        "every size",
    )
    return attach_operations(refusal, [chain])


def _of_platforms(text: str) -> str:
    """Returns the platforms to write where an operation lacks some of those of the export."""
    if found := re.search(r"exported for platforms '\((.+?),?\)'", text):  # of a function called
        return f"; or platforms=[{found[1]}]"
    if found := re.search(r"not found for platforms? \[?(.+?)\]?(\.|$)", text, re.MULTILINE):
        return f"; or platforms= without {found[1]}"
    return ""


#: jax's messages about sizes that it does not support.
_OF_SIZES = re.compile(
    "polymorphi|symbolic|static|constant|dynamic|inconclusive|_DimExpr", re.IGNORECASE
)


def _speaks_of(symbolic: list[str], error: Exception) -> bool:
    """Whether it is the symbolic dimensions that an error is about."""
    text = f"{type(error).__name__} {error}"
    names = (re.search(rf"\b{re.escape(name)}\b", text) for name in symbolic)
    return bool(symbolic) and (bool(_OF_SIZES.search(text)) or any(names))


def _symbolic_dimensions(equation: Equation) -> list[str]:
    """Returns the symbolic dimensions of operands, results and parameters of an operation."""
    atoms = (*equation.invars, *equation.outvars)
    sizes = [size for atom in atoms for size in getattr(atom.aval, "shape", ())]
    for value in equation.params.values():
        sizes += value if isinstance(value, tuple) else [value]
    texts = (str(size) for size in sizes if hasattr(size, "scope"))
    return list(dict.fromkeys(name for text in texts for name in dimensions.names(text)))


def _reason(error: Exception) -> str:
    if isinstance(error, NotDecomposedError):
        return f"there is no decomposition {error}"
    return first_line(error)
