"""Partition specs of arrays, as static data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.core._edit import with_attributes
from pax_export.core._tree import Node, attributes_of, flatten

SPECS = "_partition_specs"

Spec = tuple[Any, ...]


def specs_of(module: Node) -> dict[str, Spec]:
    """The specs that a module itself declares, by attribute."""
    return dict(attributes_of(module).get(SPECS, ()))


def with_specs(module: Node, specs: Mapping[str, Any]) -> Any:
    """Returns a module that declares these specs in addition to its own."""
    children, moduledef = flatten(module)
    values = dict(zip(moduledef.names, children))
    for name in specs:
        if name not in values or isinstance(values[name], Node):
            raise InvalidArgumentError(
                "with_sharding needs the name of an attribute of the module that holds an array.",
                where=f"{type(module).__qualname__}.{name}",
                got=f"the attributes {', '.join(values)}",
                write="module.replace(layer=module.layer.with_sharding(...)) for one inside",
            )
    merged = specs_of(module) | {name: tuple(spec) for name, spec in specs.items()}
    return with_attributes(module, {SPECS: tuple(merged.items())})
