"""The names that the package offers, and how each is called.

Public are the rooms at the top and the modules that docs/api names; rooms
within `pax_export.export` other than orbax's interface are how it is built.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pax_export as pax

#: Packages all of whose modules without an underscore are public.
_WHOLE = ("pax_export.export.orbax", "pax_export.experimental")
# Default values are printed as Python prints them: functions by their address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def modules() -> list[str]:
    """The public modules by their names, also those that cannot be loaded here."""
    found = ["pax_export", *_below("pax_export", pax.__path__)]
    for name in _WHOLE:
        spec = importlib.util.find_spec(name)
        found += _walked(name, spec.submodule_search_locations if spec else None)
    return sorted({"pax_export.export.orbax", *found})


def names() -> tuple[dict[str, list[str] | None], dict[str, str]]:
    """By module its `__all__` (None where it has none), and modules that do not load here."""
    found, missing = {}, {}
    for module in modules():
        try:
            public = getattr(importlib.import_module(module), "__all__", None)
        except ImportError as error:  # of a package that is not installed
            missing[module] = str(error).splitlines()[0]
        else:
            found[module] = None if public is None else sorted(public)
    return found, missing


def signatures(found: dict[str, list[str] | None]) -> dict[str, str]:
    """How each public name is called; its kind, if it is not to be called."""
    described = {}
    for module, public in found.items():
        for name in public or ():
            described[f"{module}.{name}"] = _described(importlib.import_module(module), name)
    return described


def _described(module: Any, name: str) -> str:
    try:
        value = getattr(module, name)
    except ImportError:
        return "not here: it needs a package that is missing"
    if inspect.ismodule(value) or not callable(value):
        return type(value).__name__
    kind = "class" if inspect.isclass(value) else "function"
    try:
        return f"{kind}{_ADDRESS.sub('', str(_without_types(inspect.signature(value))))}"
    except (TypeError, ValueError):  # written in C
        return kind


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    """Annotations may name private classes; a call does not depend on them."""
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for each in signature.parameters.values()]
    return inspect.Signature(parameters)


def _below(package: str, places: Any) -> Iterator[str]:
    for module in pkgutil.iter_modules(places, f"{package}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            yield module.name


def _walked(package: str, places: Any) -> Iterator[str]:
    for name in _below(package, places or ()):
        yield name
        folders = [f"{place}/{name.rpartition('.')[2]}" for place in places]
        yield from _walked(name, folders)
