"""Specs that do not fit: what is wrong with one, said with names and sizes."""

from __future__ import annotations

import difflib

from jax.sharding import PartitionSpec

from pax_export._errors import ShardingError
from pax_export.core import Spec
from pax_export.sharding._mesh import mesh_text, names_in, parts_of
from pax_export.sharding._places import Place
from pax_export.sharding._rules import Sizes


def require_fit(place: Place, spec: Spec, source: str, sizes: Sizes) -> None:
    """Raises unless a spec can be that of a leaf on a mesh.

    Args:
        place: the leaf.
        spec: its spec.
        source: what gave the spec.
        sizes: the axes of the mesh.

    Raises:
        ShardingError: more entries than axes, an axis that the mesh lacks or that
            stands twice, or sizes that do not divide.
    """
    given = f"{spec_text(spec)} of {source} for shape {place.shape}"
    if len(spec) > len(place.shape):
        raise ShardingError(
            "A partition spec has at most one entry for each axis of the array.",
            where=place.name,
            got=f"{len(spec)} entries for {len(place.shape)} axes: {given}",
            write="a spec of its rank; for the state of an optimizer, "
            "rules=pax.sharding.following(model, rules)",
        )
    seen: set[str] = set()
    for axis, entry in enumerate(spec):
        names = names_in(entry)
        for name in names:
            require_axis(name, sizes, place.name, given)
            if name in seen:
                raise ShardingError(
                    "A mesh axis can split only one axis of an array.",
                    where=place.name,
                    got=f"{name!r} twice in {given}",
                    write="another mesh axis, or None, in one of the two places",
                )
            seen.add(name)
        parts = parts_of(entry, sizes)
        if place.shape[axis] % parts:
            raise _indivisible(place, axis, names, parts, given, sizes)


def require_axis(name: str, sizes: Sizes, where: str, given: str) -> None:
    """Raises unless a mesh has an axis.

    Raises:
        ShardingError: it has none of this name.
    """
    if name in sizes:
        return
    close = difflib.get_close_matches(name, sizes, 1) or list(sizes)[:1]
    raise ShardingError(
        f"The mesh has no axis {name!r}.",
        where=where,
        got=f"{given}, on a mesh with {mesh_text(sizes)}",
        write=f"{close[0]!r}, or a mesh with an axis {name!r}" if close else None,
    )


def _indivisible(
    place: Place, axis: int, names: tuple[str, ...], parts: int, given: str, sizes: Sizes
) -> ShardingError:
    by = mesh_text({name: sizes[name] for name in names})
    by = by if len(names) == 1 else f"{by} (together {parts})"
    return ShardingError(
        "A mesh axis must divide the axis of the array that it splits.",
        where=place.name,
        got=f"size {place.shape[axis]} of axis {axis} by {by}: {given}",
        write=f"a size that is a multiple of {parts}, or None for axis {axis}",
    )


def spec_text(spec: Spec) -> str:
    """A spec as it is written: ``P(None, 'model')``."""
    return f"P({', '.join(map(repr, PartitionSpec(*spec)))})"
