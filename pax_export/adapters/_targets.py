"""Which modules of a net are meant: by class, by path, by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import Module, named_modules, near_names

Target = type | str | Callable[[Any], Any]


def chosen(net: Any, targets: Any, where: str) -> list[tuple[str, Any]]:
    """The modules that any of the targets means, with their paths; each must mean some."""
    named = named_modules(net)
    found: dict[str, Any] = {}
    for each in _listed(targets):
        matches = _matcher(each, where)
        matched = {path: module for path, module in named if matches(path, module)}
        if not matched:
            raise InvalidArgumentError(
                "A selection of modules matches none.",
                where=where,
                got=each.__qualname__ if isinstance(each, type) else repr(each),
                write=_suggestion(each, named),
            )
        found |= matched
    return [(path, module) for path, module in named if path in found]


def _listed(targets: Any) -> Iterable[Any]:
    if isinstance(targets, Iterable) and not isinstance(targets, (str, type, Module)):
        return targets
    return [targets]


def _matcher(each: Any, where: str) -> Callable[[str, Any], Any]:
    if isinstance(each, type):
        return lambda path, module: isinstance(module, each)
    if isinstance(each, str):
        pattern = each.split(".")
        return lambda path, module: _ends_with(path.split("."), pattern)
    if callable(each) and not isinstance(each, Module):
        return lambda path, module: each(module)
    raise InvalidArgumentTypeError(
        "A selection of modules is a class, the dotted path of some, or a function of one.",
        where=where,
        got=f"{type(each).__name__}: {each!r}"[:200],
        write='targets=(pax.Linear, "attention.query_projection", lambda module: ...)',
    )


def _ends_with(path: list[str], pattern: list[str]) -> bool:
    last = path[-len(pattern) :]
    return len(last) == len(pattern) and all(map(fnmatchcase, last, pattern))


def _suggestion(each: Any, named: list[tuple[str, Any]]) -> str:
    """What the net has instead: paths alike, or its classes."""
    if isinstance(each, str):
        paths = [path for path, _ in named if path]
        near = near_names(each, paths, 3) or paths[:3]
        return f"a path that ends so, such as {', '.join(near) or 'one of a submodule'}"
    classes = dict.fromkeys([type(module).__qualname__ for _, module in named])
    return f"what the net has: {', '.join(classes)}"
