"""The tree of a module, made again in other frameworks.

Flattening does not depend on what layers compute, so each module becomes one
of the other framework with the same attributes: the same number of nodes and
leaves, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pax_export as pax


def as_dicts(value: Any) -> Any:
    """The floor: nested dicts of the same arrays."""
    return _converted(value, lambda name, fields: fields)


def as_equinox(value: Any) -> Any:
    """The same tree of equinox modules."""
    import equinox as eqx

    classes: dict[tuple, type] = {}

    def make(name: str, fields: dict[str, Any]) -> Any:
        key = (name, *fields)
        if key not in classes:
            # A field without a type is no field of a dataclass.
            classes[key] = type(
                name, (eqx.Module,), {"__annotations__": dict.fromkeys(fields, Any)}
            )
        return classes[key](**fields)

    return _converted(value, make)


def as_nnx(value: Any) -> Any:
    """The same tree of flax nnx modules."""
    from flax import nnx

    def make(name: str, fields: dict[str, Any]) -> Any:
        module = type(name, (nnx.Module,), {})()
        for field, each in fields.items():
            setattr(module, field, _variable(nnx, each))
        return module

    return _converted(value, make)


def _variable(nnx: Any, value: Any) -> Any:
    if isinstance(value, list):
        return nnx.List([_variable(nnx, each) for each in value])
    if isinstance(value, dict):
        return nnx.Dict({key: _variable(nnx, each) for key, each in value.items()})
    return nnx.Param(value) if hasattr(value, "dtype") else value


def _converted(value: Any, make: Callable[[str, dict[str, Any]], Any]) -> Any:
    if isinstance(value, pax.Module):
        return make(type(value).__name__, _fields(value, make))
    if isinstance(value, dict):
        return {key: _converted(each, make) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_converted(each, make) for each in value]
    return value


def _fields(module: pax.Module, make: Callable[[str, dict[str, Any]], Any]) -> dict[str, Any]:
    """What of a module holds arrays; the rest is static data and costs jax nothing."""
    import jax

    return {
        name: _converted(value, make)
        for name, value in vars(module).items()
        if jax.tree.leaves(value) and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
    }
