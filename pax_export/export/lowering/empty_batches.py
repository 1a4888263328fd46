"""Symbolic sizes that may be 0.

If every result has a dimension that is 0 whenever a size is 0, the results are empty and cannot be
wrong. So the program need not check that size, and an empty batch works.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir

from pax_export.export.artifact import dimensions

_INSISTS = re.compile(r"Expected value >= 1 for dimension variable '(\w+)'")
#: Values of the other sizes while one of them is 0.
_OTHERS = (1, 2, 7)


def may_be_empty(results: Iterable[Sequence[Any]]) -> frozenset[str]:
    """Returns the symbolic sizes that make all results of these shapes empty when they are 0."""
    shapes = [[size if isinstance(size, int) else str(size) for size in each] for each in results]
    names = {name for shape in shapes for size in shape for name in dimensions.names(size)}
    return frozenset(name for name in names if all(_is_empty(each, name) for each in shapes))


def _is_empty(shape: Sequence[int | str], zero: str) -> bool:
    def vanishes(size: int | str) -> bool:
        others = set(dimensions.names(size)) - {zero}
        return all(
            dimensions.value(size, {**dict.fromkeys(others, other), zero: 0}) == 0
            for other in _OTHERS
        )

    return any(map(vanishes, shape))


def let_be_empty(operations: Sequence[Any], names: Collection[str]) -> None:
    """Drops the checks of a module, given by its operations, that these sizes are 1 or more."""
    for each in operations:
        operation = each.operation
        if "error_message" in operation.attributes and operation.name == "stablehlo.custom_call":
            message = ir.StringAttr(operation.attributes["error_message"]).value
            found = _INSISTS.search(message)
            if found and found[1] in names:
                operation.erase()
