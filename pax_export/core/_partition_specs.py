"""Partition specs of arrays, as static data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
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
    for name, spec in specs.items():
        _check_spec(module, name, spec, values)
    merged = specs_of(module) | {name: tuple(spec) for name, spec in specs.items()}
    return with_attributes(module, {SPECS: tuple(merged.items())})


def _check_spec(module: Node, name: str, spec: object, values: dict[str, Any]) -> None:
    where = f"{type(module).__qualname__}.{name}"
    if name not in values or isinstance(values[name], Node):
        raise InvalidArgumentError(
            "with_sharding needs the name of an attribute of the module that holds an array.",
            where=where,
            got=f"the attributes {', '.join(values)}",
            write="module.replace(layer=module.layer.with_sharding(...)) for one inside",
        )
    if not isinstance(spec, (tuple, PartitionSpec)) or not all(map(_is_axis, spec)):
        raise InvalidArgumentTypeError(
            "A partition spec is a tuple with a name of a mesh axis, or None, for each axis.",
            where=where,
            got=repr(spec),
            write=f'with_sharding({name}=("data", None))',
        )
    ranks = [len(leaf.shape) for leaf in tree_leaves(values[name]) if hasattr(leaf, "shape")]
    if ranks and len(spec) > min(ranks):
        raise InvalidArgumentError(
            "A partition spec has at most one entry for each axis of the array.",
            where=where,
            got=f"{len(spec)} entries for {min(ranks)} axes",
            write=f"a tuple of {min(ranks)}",
        )


def _is_axis(entry: object) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(name, str) for name in entry)
    return entry is None or isinstance(entry, str)
