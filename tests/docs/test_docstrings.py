"""What docstrings say of arguments, options, attributes and errors is what the code has."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator

from pax_export._foundations import errors
from tests.docs.pages import ROOT
from tests.docs.test_api_reference import NAMES

_ENTRY = re.compile(r"(\S[^:]*?):(?:\s|$)(.*)")
_PUBLIC_DUNDERS = ("__call__", "__getitem__")


def sections(doc: str) -> dict[str, dict[str, str]]:
    """The text of each entry of the sections ``Args:``, ``Raises:`` and so on."""
    found: dict[str, dict[str, str]] = {}
    entries, name = {}, ""
    for line in doc.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            entries, name = found.setdefault(heading[1], {}), ""
        elif (
            line.startswith("    ")
            and not line.startswith("     ")
            and (entry := _ENTRY.match(line.strip()))
        ):
            name = entry[1]
            entries[name] = entry[2]
        elif line and not line.startswith(" "):
            entries, name = {}, ""
        elif name:
            entries[name] += " " + line.strip()
    return found


def with_methods(name: str, value: object) -> Iterator[tuple[str, object]]:
    yield name, value
    for key, own in vars(value).items() if inspect.isclass(value) else ():
        method = getattr(own, "__func__", own)
        if inspect.isfunction(method) and (key[0] != "_" or key in _PUBLIC_DUNDERS):
            yield f"{name}.{key}", method


DOCUMENTED = {
    name: (value, sections(inspect.cleandoc(value.__doc__ or "")))
    for top in NAMES.items()
    for name, value in with_methods(*top)
}


def strings_in_code() -> set[str]:
    """The strings of the package that are not docstrings."""
    found = set()
    for path in (ROOT / "pax_export").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lone = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        for each in ast.walk(tree):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.update([] if id(each) in lone else [each.value, *each.value.split()])
    return found


def test_arguments_are_those_of_the_signature():
    """Public functions, constructors and methods, with their arguments in order."""
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    wrong = {}
    for name, (value, found) in DOCUMENTED.items():
        listed = [each.strip() for names in found.get("Args", ()) for each in names.split(",")]
        parameters = inspect.signature(value).parameters.values() if listed else ()
        own = [kinds.get(each.kind, "") + each.name for each in parameters]
        if listed != [each for each in own if each not in ("self", "cls")]:
            wrong[name] = (listed, own)
    assert wrong == {}


def test_options_are_words_of_the_code():
    known, wrong = strings_in_code(), {}
    for name, (_, found) in DOCUMENTED.items():
        entries = {**found.get("Args", {}), **found.get("Attributes", {})}
        options = re.findall(r'``"([A-Za-z][\w-]*)"``', " ".join(entries.values()))
        if unknown := set(options) - known:
            wrong[name] = unknown
    assert wrong == {}


def test_errors_derive_from_the_classes_that_are_named():
    """As in ``InvalidArgumentError: (a ValueError and an AssertionError) an unknown option``."""
    wrong = {}
    for name, (_, found) in DOCUMENTED.items():
        for error, text in found.get("Raises", {}).items():
            kind = getattr(errors, error, None) or getattr(builtins, error)
            stated = re.match(r"\(([^)]*)\)", text)
            bases = set(re.findall(r"\b([A-Z]\w*Error)\b", stated[1] if stated else ""))
            if others := bases - {base.__name__ for base in kind.__mro__}:
                wrong[name, error] = others
    assert wrong == {}


def test_attributes_are_set_by_the_class():
    wrong = []
    for name, (kind, found) in DOCUMENTED.items():
        if not inspect.isclass(kind) or "Attributes" not in found:
            continue
        own = [each for each in kind.__mro__ if each.__module__.startswith("pax_export.")]
        source = "\n".join(map(inspect.getsource, own))
        fields = {key for each in kind.__mro__ for key in inspect.get_annotations(each)}
        for attribute in found["Attributes"]:
            is_set = re.search(rf'self\.{attribute}\b[^=\n]*=(?!=)|"{attribute}"', source)
            if not (is_set or attribute in fields or hasattr(kind, attribute)):
                wrong.append(f"{name}.{attribute}")
    assert wrong == []
