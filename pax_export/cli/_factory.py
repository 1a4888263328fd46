"""Models and inputs given on the command line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Iterable
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError

HELP = (
    "a function without arguments that returns a model: a module, a pair (params, function) or "
    "another model that to_onnx takes; the current directory is searched for its module"
)


def add_method(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds ``--method KEY=NAME``, which `parse_methods` reads."""
    parser.add_argument("--method", action="append", default=[], metavar="KEY=NAME", help=help)


def add_against(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds ``--against``, the model that an export is compared with, and its methods."""
    parser.add_argument("--against", metavar="module:factory", help=f"{purpose}; {HELP}")
    add_method(parser, "the method of a signature; default: the one of its name, or __call__")


def call_factory(reference: str) -> Any:
    """Imports and calls the factory ``module:function``."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise InvalidArgumentError(
            "The factory cannot be found.", got=reference, write="package.module:function"
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgumentError(
            "The factory cannot be found: the module does not exist.",
            got=module_name,
            write="a module in the current directory, or an installed one",
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InvalidArgumentError(
            "The factory cannot be found: the module does not have this function.",
            where=module_name,
            got=name,
        )
    return factory()


def split_name(text: str) -> tuple[str, str]:
    """Splits ``NAME=VALUE``; the name is empty if there is no ``=``."""
    name, equals, value = text.rpartition("=")
    parts = name.strip().split(".")
    if equals and not all(part.isidentifier() or part.isdigit() for part in parts):
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='"mask=..." with the name of an input'
        )
    return name.strip(), value.strip()


def parse_methods(texts: Iterable[str]) -> dict[str, str]:
    """Reads ``KEY=NAME`` each, a signature and the method that it calls."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, name = (part.strip() for part in text.partition("="))
        if not (equals and key and name.isidentifier()):
            raise InvalidArgumentError(
                "This method cannot be read.", got=text, write="--method encode=encode"
            )
        if key in found:
            raise InvalidArgumentError("Two methods have one signature.", got=text, where=key)
        found[key] = name
    return found


class InputArguments:
    """Inputs on the command line, ``[KEY:][NAME=]SHAPE[:DTYPE]``; `keys` are named signatures."""

    def __init__(self, texts: Iterable[str], keys: Collection[str] = ()):
        self._positional: dict[str, list[Any]] = {key: [] for key in keys or [_ONLY]}
        self._named: dict[str, dict[str, Any]] = {key: {} for key in keys or [_ONLY]}
        for text in texts:
            key, rest = _split_signature(text, keys) if keys else (_ONLY, text)
            name, spec = _input_spec(rest)
            if not name:
                self._positional[key].append(spec)
            elif name in self._named[key]:
                raise InvalidArgumentError("Two inputs have one name.", got=text)
            else:
                self._named[key][name] = spec

    @property
    def inputs(self) -> Any:
        """The ``inputs`` argument of an export."""
        found = {key: tuple(each) for key, each in self._positional.items()}
        return found.get(_ONLY, found)

    @property
    def kwargs(self) -> Any:
        """The ``kwargs`` argument of an export."""
        return self._named.get(_ONLY, self._named)


_ONLY = ""


def _split_signature(text: str, keys: Collection[str]) -> tuple[str, str]:
    key, colon, rest = (part.strip() for part in text.partition(":"))
    if key in keys and colon:
        return key, rest
    if len(keys) == 1:
        return next(iter(keys)), text
    raise InvalidArgumentError(
        "With several methods, an input begins with the signature that takes it.",
        got=text,
        write=" or ".join(f'--input "{key}:{text}"' for key in keys),
    )


def _input_spec(text: str) -> tuple[str, Any]:
    from pax_export.export import spec

    name, rest = split_name(text)
    shape, colon, dtype = rest.rpartition(":")
    if not colon:
        shape, dtype = rest, "float32"
    if name and not name.isidentifier():
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='--input "mask=batch, length:bool"'
        )
    return name, spec(shape.strip(), dtype.strip())
