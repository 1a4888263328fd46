"""Parsing of reports: typed plain data, nested values with flat names.

Nested arguments and outputs are described as plain data, from which `rebuild` restores them:

    {"leaf": "name"}            an array
    {"none": true}              None
    {"static": {"value": 3}}    a Python value fixed at export, or
    {"static": {"text": "..."}} the text of a value that is not plain data
    {"list": [...]}, {"tuple": [...]}
    {"dict": [[key, ...], ...]} a dict, or the fields of any other node
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError

_DEEPEST = 100
#: The kinds of arguments that callers may omit.
_FIXED = frozenset({"static", "none"})


def check(structure: object, names: Collection[str], where: str, depth: int = 0) -> None:
    """Refuses anything but a structure over arrays of these names."""
    if not isinstance(structure, Mapping) or len(structure) != 1 or depth > _DEEPEST:
        raise ValueError(f"{where} is not a structure")
    ((kind, content),) = structure.items()
    if kind == "leaf":
        if not isinstance(content, str) or content not in names:
            raise ValueError(f"{where} names an array that is not there")
    elif kind == "dict" and isinstance(content, list):
        for entry in content:
            if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) in (str, int)):
                raise ValueError(f"{where} is not a structure")
            check(entry[1], names, f"{where}.{entry[0]}", depth + 1)
    elif kind in ("list", "tuple") and isinstance(content, list):
        for index, child in enumerate(content):
            check(child, names, f"{where}.{index}", depth + 1)
    elif kind == "static":
        text = content.get("text", "") if isinstance(content, Mapping) else None
        if not isinstance(text, str) or len(content) != 1 or not {"value", "text"} & set(content):
            raise ValueError(f"{where} is not a structure")
        if not isinstance(content.get("value", ""), (bool, int, float, str)):
            raise ValueError(f"{where} is not a Python value")
    elif kind != "none":
        raise ValueError(f"{where} is not a structure")


def rebuild(structure: Mapping[str, Any], leaf: Callable[[str], Any]) -> Any:
    """Rebuilds the nested value; ``leaf`` returns the array of a name.

    Example:
        >>> rebuild({"tuple": [{"leaf": "a"}, {"none": True}]}, {"a": 1}.get)
        (1, None)
    """
    ((kind, content),) = structure.items()
    if kind == "leaf":
        return leaf(content)
    if kind == "none":
        return None
    if kind == "static":
        return content["value"] if "value" in content else Fixed(content["text"])
    if kind == "dict":
        return {key: rebuild(child, leaf) for key, child in content}
    return {"list": list, "tuple": tuple}[kind](rebuild(child, leaf) for child in content)


def collect(structure: Mapping[str, Any], value: object, into: dict[str, Any], path: str) -> None:
    """Puts the arrays of a nested value under their names into a dict."""
    ((kind, content),) = structure.items()
    if kind == "leaf":
        into[content] = value
        return
    if kind == "none" and value is None:
        return
    if kind == "static":
        _check_fixed(rebuild(structure, into.get), value, path)
        return
    if kind == "dict":
        fields = value if isinstance(value, Mapping) else _fields_of(value, content)
        # A field that was None at export is empty, and may be omitted.
        entries = [each for each in content if "none" not in each[1] or each[0] in fields]
        keyed = {key: _child_of(fields, key, path) for key, _ in entries}
        if all(_first_part(name, keyed) in keyed for name in fields):
            for key, child in entries:
                collect(child, keyed[key], into, f"{path}.{key}")
            return
    elif kind in ("list", "tuple") and isinstance(value, Mapping):
        keys = [str(index) for index in range(len(content))]
        if {_first_part(name, keys) for name in value} == set(keys):
            items = [_child_of(value, key, path) for key in keys]
            return collect({"list": content}, items, into, path)
    elif kind in ("list", "tuple") and isinstance(value, (list, tuple)):
        if len(value) == len(content):
            for index, child in enumerate(content):
                collect(child, value[index], into, f"{path}.{index}")
            return
    raise InvalidArgumentError(
        "An argument has a different structure than the exported one.",
        where=path,
        got=_brief(value),
        write=_brief(rebuild(structure, lambda name: ...)),
    )


def fixed_arguments(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments, given by their structure, that are Python values as a whole, or None.

    Example:
        >>> fixed_arguments({"x": {"leaf": "x"}, "batched": {"static": {"value": True}}})
        {'batched': True}
    """
    fixed = {name: tree for name, tree in arguments.items() if not tree.keys().isdisjoint(_FIXED)}
    return {name: rebuild(tree, str) for name, tree in fixed.items()}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Stands for a Python value that a report has only the name of."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _check_fixed(known: object, value: object, path: str) -> None:
    """Refuses a Python value that differs from the fixed one of the exported function."""
    # A name alone does not show whether two objects are the same.
    if isinstance(known, Fixed) or (type(value) is type(known) and value == known):
        return
    raise InvalidArgumentError(
        "The argument is a Python value that was fixed at export.",
        where=path,
        got=repr(value)[:100],
        write=f"{known!r}, or omit it; other values need another export",
    )


def _fields_of(value: object, content: Collection[Any]) -> dict[Any, Any]:
    """Returns the children of a node of jax by their keys, and attributes of other objects."""
    jax: Any = sys.modules.get("jax")
    children = {}
    if jax is not None:
        nodes, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
        # Without key paths, jax numbers the children.
        children = {getattr(path[0], "key", None): child for path, child in nodes if path}
    named = {key: getattr(value, str(key)) for key, _ in content if hasattr(value, str(key))}
    return named | {key: child for key, child in children.items() if isinstance(key, (str, int))}


def _first_part(name: object, known: Collection[Any]) -> Any:
    """A key, or the first part of a name with dots: reports name nested arrays so."""
    return name if name in known or not isinstance(name, str) else name.partition(".")[0]


def _child_of(value: Mapping[Any, Any], key: object, path: str) -> Any:
    if key not in value:
        begin = f"{key}."
        below = {
            name.removeprefix(begin): each
            for name, each in value.items()
            if isinstance(name, str) and name.startswith(begin)
        }
        if below:
            return below
    try:
        return value[key]
    except KeyError as error:
        raise InvalidArgumentError(
            f"An argument has no {key!r}, which the exported model takes.",
            where=path,
            got=_brief(value),
        ) from error


def _brief(value: object) -> str:
    """The structure of a value, with `...` for its arrays."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_brief(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_brief(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return "None" if value is None else "..."


_LARGEST = 2**63


def read(kind: Any, value: object, where: str = "the report") -> Any:
    """Converts JSON data to a type; errors name the path in the data.

    The type is a dataclass, or one that its fields may have: `int`, `float`, `str`, `bool`,
    `None`, `Any`, a `Literal`, a union, a ``tuple[X, ...]``, a ``dict[str, X]``.

    Example:
        >>> read(tuple[int, ...], [1, 2]), read(dict[str, float], {"a": 1})
        ((1, 2), {'a': 1.0})
        >>> read(tuple[int, ...], [1, "2"])
        Traceback (most recent call last):
        ValueError: the report.1 is not of type int
    """
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    origin = typing.get_origin(kind)
    if origin in _OF_ORIGIN:
        return _OF_ORIGIN[origin](typing.get_args(kind), value, where)
    if kind is Any:
        _check_plain(value, where)
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is not of type {kind.__name__}")
    return _plain_atom(value, where)


def _plain_atom(value: object, where: str) -> Any:
    if type(value) is int and abs(value) >= _LARGEST:
        raise ValueError(f"{where} is too large a number")
    if type(value) is str:
        value.encode()  # half of a surrogate pair is no text
    return value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is not an object")
    hints, needed = _field_types(kind)
    unknown = sorted(set(value) - set(hints))
    missing = sorted(needed - set(value))
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}, which is not known here")
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}")
    return kind(**{name: read(hints[name], value[name], f"{where}.{name}") for name in value})


@functools.cache
def _field_types(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of all fields, and those that must be given."""
    missing = dataclasses.MISSING
    needed = frozenset(
        each.name
        for each in dataclasses.fields(kind)
        if each.default is missing and each.default_factory is missing
    )
    return typing.get_type_hints(kind), needed


def _read_tuple(args: tuple, value: object, where: str) -> tuple:
    if not isinstance(value, list):
        raise ValueError(f"{where} is not a list")
    kinds = args[:1] * len(value) if args[-1] is ... else args
    if len(kinds) != len(value):
        raise ValueError(f"{where} has {len(value)} members instead of {len(kinds)}")
    return tuple(read(kinds[i], each, f"{where}.{i}") for i, each in enumerate(value))


def _read_dict(args: tuple, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is not an object")
    return {_plain_atom(k, where): read(args[1], v, f"{where}.{k}") for k, v in value.items()}


def _read_literal(args: tuple, value: object, where: str) -> Any:
    for each in args:
        if type(each) is type(value) and each == value:
            return value
    raise ValueError(f"{where} is none of {', '.join(map(repr, args))}")


def _read_union(args: tuple, value: object, where: str) -> Any:
    error: ValueError | None = None
    for each in args:
        try:
            return read(each, value, where)
        except ValueError as caught:
            # Of `X | None`, the reason why it is no X is more specific.
            error = error or caught
    raise error or ValueError(where)


_OF_ORIGIN: dict[Any, Callable[[tuple, Any, str], Any]] = {
    tuple: _read_tuple,
    dict: _read_dict,
    typing.Literal: _read_literal,
    typing.Union: _read_union,
    types.UnionType: _read_union,
}


def _check_plain(value: object, where: str, depth: int = 0) -> None:
    """Refuses data that cannot be printed or is too deeply nested."""
    if depth > _DEEPEST:
        raise ValueError(f"{where[:200]} is nested too deeply")
    if not isinstance(value, (Mapping, list)):
        _plain_atom(value, where)
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        _plain_atom(key, where)
        _check_plain(each, f"{where}.{key}", depth + 1)
