"""What stands on the command line for a model and its inputs."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pax_export._errors import InvalidArgumentError

HELP = (
    "a function without arguments that returns a module or a pair (params, function); "
    "modules of the current directory are found"
)


def make(place: str) -> Any:
    """Imports the factory ``module:function`` and calls it.

    Raises:
        InvalidArgumentError: it is not there.
    """
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise InvalidArgumentError(
            "The factory cannot be found.", got=place, write="package.module:function"
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgumentError(
            "The factory cannot be found: there is no such module.",
            got=module_name,
            write="a module of the current directory, or one that is installed",
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InvalidArgumentError(
            "The factory cannot be found: the module has no such function.",
            where=module_name,
            got=name,
        )
    return factory()


def named(text: str) -> tuple[str, str]:
    """Splits ``NAME=VALUE``; the name is empty if there is none.

    Raises:
        InvalidArgumentError: what stands before the sign is no name.
    """
    name, equals, value = text.rpartition("=")
    parts = name.strip().split(".")
    if equals and not all(part.isidentifier() or part.isdigit() for part in parts):
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='"mask=..." with the name of an input'
        )
    return name.strip(), value.strip()


def input_spec(text: str) -> tuple[str, Any]:
    """Reads ``[NAME=]SHAPE[:DTYPE]``.

    Raises:
        InvalidArgumentError: it cannot be read.
    """
    from pax_export.export import spec

    name, rest = named(text)
    shape, colon, dtype = rest.rpartition(":")
    if not colon:
        shape, dtype = rest, "float32"
    if name and not name.isidentifier():
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='--input "mask=batch, length:bool"'
        )
    return name, spec(shape.strip(), dtype.strip())
