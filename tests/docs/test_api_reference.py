"""Every public name is in the API reference, and its docstring shows an example."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import is_typeddict

import pytest

import pax_export
from pax_export.export import symbolic_numpy
from tests.docs.pages import ROOT, extension


def public_rooms(room: ModuleType = pax_export) -> list[ModuleType]:
    """The package and every room that can be reached from it by public names."""
    inner = [getattr(room, name) for name in room.__all__]
    return [room, *(found for x in inner if inspect.ismodule(x) for found in public_rooms(x))]


def public_names() -> dict[str, object]:
    return {
        f"{room.__name__}.{name}": getattr(room, name)
        for room in public_rooms()
        for name in room.__all__
    }


#: They have the arguments and docstrings of jax's functions; the guide on exporting lists them.
_OF_JAX = "pax_export.export.symbolic_numpy."
LISTED = extension("ours").listed(ROOT / "docs" / "api")
NAMES = {
    name: value
    for name, value in public_names().items()
    # Errors and warnings are explained in a table, which tests/test_public_errors.py reads.
    if callable(value) and not name.startswith(("pax_export.errors.", _OF_JAX))
}
CLASSES = {
    name: value
    for name, value in LISTED.items()
    if inspect.isclass(value) and not is_typeddict(value)
}


def test_functions_of_symbolic_sizes_are_in_the_guide():
    guide = (ROOT / "docs" / "guide" / "exporting.md").read_text(encoding="utf-8")
    assert [each for each in symbolic_numpy.__all__ if f"`{each}`" not in guide] == []


def test_every_listed_name_is_public():
    assert set(LISTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_listed(name):
    assert any(NAMES[name] is value for value in LISTED.values())


@pytest.mark.parametrize("name", LISTED)
def test_docstring_shows_an_example(name):
    text = LISTED[name].__doc__ or ""
    assert "Example" in text
    assert ">>>" in text


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_are_documented(name):
    cls = CLASSES[name]
    methods = [key for key, value in vars(cls).items() if key[0] != "_" and callable(value)]
    assert [key for key in methods if not inspect.getdoc(getattr(cls, key))] == []


@pytest.mark.parametrize("name", CLASSES)
def test_signature_is_that_of_the_constructor(name):
    kinds = {parameter.kind for parameter in inspect.signature(CLASSES[name]).parameters.values()}
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert kinds & variadic != variadic  # (*args, **kwargs) tells the reader nothing
