"""Arrays that jax does not see: those inside the static data of a module."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from pax_export.core._traversal import join, named_leaves, named_modules
from pax_export.core._tree import Node, flatten, is_array

# Code and what wraps code: an array that a function closes over is a constant
# of the function, which is no mistake.
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)


def hidden_arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    """Finds arrays in static data: in plain objects, sets, odd dicts.

    They are neither trained nor saved, and to jax they are constants.

    Args:
        tree: a module, or any pytree of modules.

    Yields:
        The dotted path of each, and the array.

    Example:
        >>> import jax.numpy as jnp, types, pax_export as pax
        >>> table = types.SimpleNamespace(rows=jnp.ones(3))
        >>> net = pax.Module().set_attribute("table", table)
        >>> [path for path, _ in hidden_arrays(net)]
        ['table.rows']
    """
    seen: set[int] = set()
    for path, module in named_modules(tree):
        for name, value in flatten(module)[1].static.items():
            yield from _arrays_in(value, join(path, name), seen)


def _arrays_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if is_array(value):
        yield path, value
        return
    if id(value) in seen or isinstance(value, _CODE):
        return
    seen.add(id(value))
    if isinstance(value, Node):
        yield from ((join(path, name), leaf) for name, leaf in named_leaves(value))
        return
    for name, part in _parts(value):
        yield from _arrays_in(part, join(path, str(name)), seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()
