"""Nested values and flat names: one written as the other, and back.

A signature of a SavedModel takes and gives flat, named arrays.  A model's
arguments and outputs may be nested, so their structure is written down as
plain data (in the report, by `describe`) from which `rebuild` makes it again:

    {"leaf": "name"}            an array
    {"none": true}              None
    {"list": [...]}, {"tuple": [...]}
    {"dict": [[key, ...], ...]} a dict, or the fields of any other node
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pax_export._errors import InvalidArgumentError

_DEEPEST = 100


def check(structure: Any, names: Collection[str], where: str, depth: int = 0) -> None:
    """Refuses what is no structure over arrays of these names."""
    if not isinstance(structure, Mapping) or len(structure) != 1 or depth > _DEEPEST:
        raise ValueError(f"{where} is no structure")
    ((kind, content),) = structure.items()
    if kind == "leaf":
        if not isinstance(content, str) or content not in names:
            raise ValueError(f"{where} names an array that is not there")
    elif kind == "dict" and isinstance(content, list):
        for entry in content:
            if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) in (str, int)):
                raise ValueError(f"{where} is no structure")
            check(entry[1], names, f"{where}.{entry[0]}", depth + 1)
    elif kind in ("list", "tuple") and isinstance(content, list):
        for index, child in enumerate(content):
            check(child, names, f"{where}.{index}", depth + 1)
    elif kind != "none":
        raise ValueError(f"{where} is no structure")


def rebuild(structure: Mapping[str, Any], leaf: Callable[[str], Any]) -> Any:
    """Makes the nested value again; ``leaf`` gives the array of a name.

    Example:
        >>> rebuild({"tuple": [{"leaf": "a"}, {"none": True}]}, {"a": 1}.get)
        (1, None)
    """
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return leaf(content)
    if kind == "none":
        return None
    if kind == "dict":
        return {key: rebuild(child, leaf) for key, child in content}
    return {"list": list, "tuple": tuple}[kind](rebuild(child, leaf) for child in content)


def collect(structure: Mapping[str, Any], value: Any, into: dict[str, Any], path: str) -> None:
    """Puts the arrays of a nested value under their names into a dict."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        into[content] = value
        return
    if kind == "none" and value is None:
        return
    if kind == "dict":
        keyed = {key: _child(value, key, path) for key, _ in content}
        if not isinstance(value, Mapping) or len(value) == len(keyed):
            for key, child in content:
                collect(child, keyed[key], into, f"{path}.{key}")
            return
    elif kind in ("list", "tuple") and isinstance(value, (list, tuple)):
        if len(value) == len(content):
            for index, child in enumerate(content):
                collect(child, value[index], into, f"{path}.{index}")
            return
    raise InvalidArgumentError(
        "An argument has another structure than the exported one.",
        where=path,
        got=_brief(value),
        write=_brief(rebuild(structure, lambda name: ...)),
    )


def _child(value: Any, key: Any, path: str) -> Any:
    try:
        return value[key] if isinstance(value, Mapping) else getattr(value, str(key))
    except (KeyError, AttributeError) as error:
        raise InvalidArgumentError(
            f"An argument has no {key!r}, which the exported model takes.",
            where=path,
            got=_brief(value),
        ) from error


def _brief(value: Any) -> str:
    """The structure of a value, with `...` for its arrays."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_brief(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_brief(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return "None" if value is None else "..."
