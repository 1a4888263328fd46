"""Values given to a function, brought to the names of its flat inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.export.artifact.structure import collect
from pax_export.export.tracing.spec import Inputs


def bind(inputs: Inputs, given: Any, where: str) -> dict[str, Any]:
    """The arrays in ``given``, by the names of the inputs.

    Args:
        inputs: what the function takes.
        given: a tuple of positional arguments, the only argument, or a dict of
            all arguments by name.
        where: what messages call it.
    """
    arguments, error = inputs.structure(), None
    for reading in _readings(given, arguments, inputs.positional):
        found: dict[str, Any] = {}
        try:
            for name, structure in arguments.items():
                collect(structure, reading[name], found, f"{where}: {name}")
        except InvalidArgumentError as mistake:
            error = error or mistake
        else:
            return found
    raise error or InvalidArgumentError(
        "These are other values than the arguments.",
        where=where,
        got=f"{len(given)} values" if isinstance(given, (tuple, Mapping)) else "1 value",
        write="a tuple of positional arguments, or a dict with " + ", ".join(arguments),
    )


def _readings(
    given: Any, arguments: Mapping[str, Any], positional: Sequence[str]
) -> list[dict[str, Any]]:
    """What a value can stand for: arguments by position or by name, or the only one."""
    readings = []
    if isinstance(given, tuple) and len(given) == len(arguments) == len(positional):
        readings.append(dict(zip(positional, given)))
    if isinstance(given, Mapping) and sorted(given) == sorted(arguments):
        readings.append(dict(given))
    if len(arguments) == 1:
        ((name, structure),) = arguments.items()
        if not (isinstance(given, tuple) and "leaf" in structure):
            readings.append({name: given})
    return readings
