"""Which public name of the library a piece of code in a page means.

Nothing of Sphinx is needed here, so tests ask the same questions without a build.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import pax_export
from pax_export import errors, nets

_LIST = re.compile(r"^```\{eval-rst\}\n\.\. currentmodule:: (\S+)\n(.*?)^```$", re.M | re.S)
_ENTRY = re.compile(r"^   (\w+)$", re.M)
_CODE = re.compile(r"@?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?", re.S)
_PROMPT = re.compile(r"^(?:>>>|\.\.\.) ?", re.M)

# What pages call a module, whatever they made it of.
_VARIABLES = {
    "net": pax_export.Module,
    "model": pax_export.Module,
    "module": pax_export.Module,
    "lm": nets.Decoder,
}
# A word like `load` needs its room before it; these do not, and the others mean something else.
_ALONE = {"adopt", "pure", "purecall", "renew", "retarget"}
_NOT_ALONE = {"Any", "Mesh", "top_k"}
# Pages about a room say its names without the room.
_ROOMS = {
    "guide/bring_your_weights": ["weights"],
    "guide/checkpoints": ["checkpoint"],
    "guide/distributed": ["sharding"],
    "guide/exporting": ["export"],
    "guide/finetuning": ["adapters"],
    "guide/inspecting": ["inspection", "debug", "export"],
    "guide/sharding": ["sharding"],
    "guide/targets": ["export"],
    "guide/training": ["optim", "precision"],
    "guide/transforms": ["transforms"],
    "quickstart": ["export"],
    "scaling": ["sharding"],
    "stability": ["export"],
}


def listed(api: Path) -> dict[str, object]:
    """What the pages of the API reference list: dotted name -> object."""
    return {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for page in sorted(api.glob("*.md"))
        for module, body in _LIST.findall(page.read_text(encoding="utf-8"))
        for name in _ENTRY.findall(body)
    }


def imported(codes: Iterable[str]) -> dict[str, str]:
    """What the imports of some code call modules and names, prompts of doctests or not."""
    found: dict[str, str] = {}
    for code in codes:
        lines = _PROMPT.sub("", code) if code.lstrip().startswith(">>>") else code
        try:
            tree = ast.parse(lines)
        except SyntaxError:  # a session, with what it prints
            lines = "\n".join(
                line for line in lines.splitlines() if re.match(r"(import|from) ", line)
            )
            try:
                tree = ast.parse(lines)
            except SyntaxError:
                continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {each.asname: each.name for each in node.names if each.asname}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {
                    each.asname or each.name: f"{node.module}.{each.name}" for each in node.names
                }
    return found


class Ours:
    """The names that the API reference lists, and what pages mean by them.

    Args:
        api: the folder of the reference.
    """

    def __init__(self, api: Path) -> None:
        self.objects = listed(api)
        self.objects |= {
            f"pax_export.errors.{name}": getattr(errors, name) for name in errors.__all__
        }
        self._names = {id(value): name for name, value in reversed(self.objects.items())}
        self.rooms = _rooms(api)
        self._alone: dict[str, str | None] = {}
        for name, value in self.objects.items():
            last = name.rpartition(".")[2]
            name = self._names[id(value)]
            self._alone[last] = name if self._alone.get(last, name) == name else None

    def find(self, text: str, imports: Mapping[str, str] = {}, page: str = "") -> str | None:
        """The listed name that a piece of code means, with `.member` of a class.

        A room means the page that lists its names.

        Args:
            text: what stands in backticks: `pax.inspect(path)`, `Decoder.from_gguf`.
            imports: what `imported` finds in the code of the page.
            page: the page's name, from docs/ on and without an ending.
        """
        match = _CODE.fullmatch(text)
        if match is None:
            return None
        first, *rest = match[1].split(".")
        if first in imports:
            origin = imports[first]
            if origin.partition(".")[0] != "pax_export":
                return None
            return self._walk(_import(origin), rest)
        if first in ("pax", "pax_export"):
            return self._walk(pax_export, rest) if rest else None
        for room in _ROOMS.get(page, ()):
            if found := self._walk(getattr(pax_export, room), [first, *rest]):
                return found
        if not rest:
            return self._find_alone(first)
        if first in _VARIABLES:
            return self._walk(_VARIABLES[first], rest)
        if first in pax_export.__all__ and inspect.ismodule(getattr(pax_export, first)):
            return self._walk(getattr(pax_export, first), rest)
        if (owner := self._find_alone(first)) and owner in self.objects:
            return self._walk(self.objects[owner], rest)
        return None

    def name_of(self, value: object) -> str | None:
        """The name under which an object is listed."""
        return self._names.get(id(value))

    def _find_alone(self, name: str) -> str | None:
        is_word = name.islower() and "_" not in name and name not in _ALONE
        if is_word or name in _NOT_ALONE or hasattr(builtins, name):
            return None
        return self._alone.get(name)

    def _walk(self, value: object, path: list[str]) -> str | None:
        """The name of what stands at the end of a path of attributes."""
        while path and inspect.ismodule(value):
            if path[0].startswith("_"):
                return None
            try:
                value, path = getattr(value, path[0]), path[1:]
            except (AttributeError, ImportError):  # of a package that is not here
                return None
        if inspect.ismodule(value):
            return value.__name__ if value.__name__ in self.rooms else None
        name = self._names.get(id(value))
        if name is None or not path:
            return name
        if path[0].startswith("_") or not _has(value, path[0]):
            return None
        return f"{name}.{path[0]}"


def _rooms(api: Path) -> dict[str, str]:
    """The page that lists a room's names, by the room."""
    pages = {}
    for page in sorted(api.glob("*.md")):
        for module, _ in _LIST.findall(page.read_text(encoding="utf-8")):
            if module != "pax_export" and (module not in pages or page.stem in module):
                pages[module] = f"api/{page.stem}"
    return {**pages, "pax_export.nn": "api/layers", "pax_export.errors": "api/errors"}


def _has(value: object, name: str) -> bool:
    """Whether a class has an attribute, or says that its instances have it."""
    kinds = value.__mro__ if inspect.isclass(value) else ()
    return any(name in {**vars(kind), **inspect.get_annotations(kind)} for kind in kinds)


def _import(path: str) -> object:
    """The object at a dotted path, whichever part of it is a module."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ImportError:
        parent: ModuleType = importlib.import_module(module)
        return getattr(parent, name)
