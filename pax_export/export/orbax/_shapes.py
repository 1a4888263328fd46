"""Converts partially known TensorFlow shapes to symbolic dimensions.

A method's `input_polymorphic_shape` is a pytree, or a prefix of one, like its input. Its leaves are
``None`` (all sizes are known), a string for `jax.export.symbolic_shape` (``"b, ..."``), or a
sequence of dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import export as jax_export

from pax_export._errors import InvalidArgumentError, first_line
from pax_export._types import PyTree
from pax_export.export.artifact import dimensions

CONSTRAINTS = 'jax2tf_kwargs={"polymorphic_constraints": ("b >= 2",)}'


def broadcast_prefix(
    prefix: object, tree: PyTree, argument: str, is_leaf: PyTree = None
) -> list[Any]:
    """Broadcasts a prefix tree to one value per leaf."""
    values: list[Any] = []

    def stop(value: PyTree) -> bool:
        return value is None or (is_leaf is not None and is_leaf(value))

    def spread(value: object, below: object) -> None:
        values.extend([value] * jax.tree_util.tree_structure(below).num_leaves)

    try:
        jax.tree_util.tree_map(spread, prefix, tree, is_leaf=stop)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"`{argument}` must have the structure of what it describes, or be the beginning "
            f"of it: {first_line(error)}",
            got=str(prefix),
            write=str(jax.tree_util.tree_structure(tree)),
        ) from error
    return values


def symbolic_input_shapes(
    names: Sequence[str],
    shapes: Sequence[Sequence[int | None]],
    specs: Sequence[Any],
    constraints: Sequence[str],
) -> list[tuple]:
    """Shapes of the inputs of a method, with symbolic dimensions of `specs` in one scope."""
    try:
        scope = jax_export.SymbolicScope(tuple(constraints))
    except ValueError as error:
        raise InvalidArgumentError(
            f"`polymorphic_constraints` cannot be read: {first_line(error)}",
            got=repr(constraints),
            write=CONSTRAINTS,
        ) from error
    return [_symbolic_shape(*each, scope) for each in zip(names, shapes, specs)]


def _symbolic_shape(name: str, shape: Sequence[int | None], spec: object, scope: PyTree) -> tuple:
    text = _shape_text(spec)
    if text is None:
        if None in shape:
            raise InvalidArgumentError(
                f"The size of dimension {list(shape).index(None)} of an input is not known, and "
                f"has no name (syntax error in symbolic shape {spec!r}).",
                where=name,
                got=f"shape {list(shape)}, input_polymorphic_shape {spec!r}",
                write=_suggest_shape(shape),
            )
        return tuple(shape)
    try:
        found = tuple(jax_export.symbolic_shape(text, like=tuple(shape), scope=scope))
        if len(found) != len(shape):
            raise ValueError(f"{len(found)} sizes for {len(shape)} dimensions")
    except (ValueError, TypeError, AssertionError) as error:
        line = first_line(error)
        about = line if "syntax error" in line else f"syntax error in symbolic shape: {line}"
        raise InvalidArgumentError(
            f"A symbolic shape does not describe its input: {about}",
            where=name,
            got=f"shape {list(shape)}, input_polymorphic_shape {spec!r}",
            write=_suggest_shape(shape),
        ) from error
    for index, (known, size) in enumerate(zip(shape, found)):
        if isinstance(size, int) and known != size:
            what = "is not known" if known is None else f"is {known}"
            raise InvalidArgumentError(
                f"The size of dimension {index} of an input {what}, and "
                f"`input_polymorphic_shape` must name it or say the same (syntax error in "
                f"symbolic shape {spec!r}).",
                where=name,
                got=f"shape {list(shape)}",
                write=_suggest_shape(shape),
            )
    return found


def _suggest_shape(shape: Sequence[int | None]) -> str:
    """A symbolic shape that describes this one."""
    names = iter("bcdefghij")
    sizes = ", ".join(next(names, "k") if size is None else str(size) for size in shape)
    return f'input_polymorphic_shape="{sizes}", with a name for each size that is not known'


def is_spec(value: object) -> bool:
    """Returns whether this is the shape of one array, not a tree of shapes."""
    if isinstance(value, str) or type(value).__name__ == "PolyShape":
        return True
    return isinstance(value, tuple) and any(
        size is ... or isinstance(size, int) or jax_export.is_symbolic_dim(size) for size in value
    )


def _shape_text(spec: object) -> str | None:
    if spec is None or isinstance(spec, str):
        return spec
    if not isinstance(spec, (tuple, list)):
        raise InvalidArgumentError(
            "`input_polymorphic_shape` must hold None and text.",
            got=repr(spec),
            write='input_polymorphic_shape="b, ..."',
        )
    return ", ".join("..." if size is ... else "_" if size is None else str(size) for size in spec)


def shapes_of_results(
    results: Sequence[tuple], symbolic_shapes: Sequence[tuple], shapes: Sequence[Sequence]
) -> list[list[int | None]]:
    """Returns the shapes of results as numbers, where these follow from known sizes."""
    found: dict[str, int] = {}
    for names, numbers in zip(symbolic_shapes, shapes):
        for name, number in zip(map(str, names), numbers):
            if number is not None and name.isidentifier():
                found[name] = int(number)

    def known(size: object) -> int | None:
        size = size if isinstance(size, int) else str(size)
        return dimensions.value(size, found) if set(dimensions.names(size)) <= set(found) else None

    return [list(map(known, shape)) for shape in results]
