"""Converts partially known TensorFlow shapes to symbolic dimensions, and results back."""

from __future__ import annotations

from collections.abc import Sequence

from jax import export as jax_export

from pax_export._errors import InvalidArgumentError, first_line
from pax_export.export.artifact import dimensions


def symbolic_shape(
    name: str, shape: Sequence[int | None], spec: str | None, scope: jax_export.SymbolicScope
) -> tuple:
    """The shape of an input, with a symbolic dimension for each size that is not known."""
    names = iter("bcdefghij")
    example = ", ".join(next(names, "k") if size is None else str(size) for size in shape)

    def refusal(why: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"syntax error in symbolic shape {spec!r}: {why.removeprefix('syntax error ')}",
            where=name,
            got=f"shape {list(shape)}, input_polymorphic_shape {spec!r}",
            write=f'input_polymorphic_shape="{example}", with a name for each unknown size',
        )

    if spec is None:
        if None in shape:
            index = list(shape).index(None)
            raise refusal(f"the size of dimension {index} is not known, and has no name")
        return tuple(shape)
    try:
        found = tuple(jax_export.symbolic_shape(spec, like=tuple(shape), scope=scope))
    except (ValueError, TypeError, AssertionError) as error:
        raise refusal(first_line(error)) from error
    if len(found) != len(shape):
        raise refusal(f"{len(found)} sizes for {len(shape)} dimensions")
    for index, (known, size) in enumerate(zip(shape, found)):
        if isinstance(size, int) and known != size:
            raise refusal(f"dimension {index} is {'not known' if known is None else known}")
    return found


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
