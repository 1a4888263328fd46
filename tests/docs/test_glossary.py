"""The glossary holds: its names are in the code, and words that went are not."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PACKAGE = ROOT / "pax_export"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (?!word )(.+?) \| (.+?) \|(?: (.*?))? \|$", re.MULTILINE)
ROWS = _ROW.findall(GLOSSARY)
NAMES = sorted({name for _, _, code in ROWS for name in re.findall(r"`([^`]+)`", code)})

# Words that the glossary replaced, by the room or file that used them.  A word that was given
# up goes here, so that it does not come back; some mean another thing in another room.
REPLACED = {
    "core": "layout layouts intern_layout settle settled settles volatile session newborn "
    "structural PURE",
    "precision": "settle newborn",
    "export": "Making Plan plan",
}


def sources(room: str) -> list[Path]:
    place = PACKAGE / room
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


@functools.cache
def defined(room: str) -> set[str]:
    """What the files of a room define at their top, or import from others."""
    names = set()
    for source in sources(room):
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    names.add(node.name)
                case ast.ImportFrom(names=[ast.alias(name="*")], module=module):
                    names |= set(dir(importlib.import_module(module)))
                case ast.ImportFrom():
                    names |= {alias.asname or alias.name for alias in node.names}
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {
                        name.id for each in targets for name in ast.walk(each)
                        if isinstance(name, ast.Name)
                    }  # fmt: skip
    return names


def words(source: Path) -> Iterator[tuple[int, str]]:
    """The names, comments and docstrings of a file, with their lines."""
    text = source.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT):
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_each_word_has_one_row():
    terms = [term for term, _, _ in ROWS]
    assert len(terms) == len(set(terms)) > 50
    assert GLOSSARY.count("\n| ") == len(ROWS) + GLOSSARY.count("\n| word |")


def test_the_index_links_it():
    assert "\nglossary\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_it_is_in_the_code(name):
    *rooms, name = name.split(".") if "." in name else (name, "")
    room = "/".join(rooms)
    assert sources(room)[0].exists()
    assert not name or name in defined(room)


@pytest.mark.parametrize("room", REPLACED)
def test_no_replaced_word_is_left(room):
    old = re.compile(rf"\b({'|'.join(REPLACED[room].split())})\b") if REPLACED[room] else None
    found = [
        f"{source.relative_to(ROOT)}:{line}: {match[0]}"
        for source in sources(room)
        for line, text in words(source)
        if old and (match := old.search(text))
    ]
    assert found == []
