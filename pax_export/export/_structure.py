"""Nested values and flat names: one written as the other, and back.

A signature of a SavedModel takes and gives flat, named arrays.  A model's
arguments and outputs may be nested, so their structure is written down as
plain data (for the manifest) from which `rebuild` makes it again:

    {"leaf": "name"}            an array
    {"none": true}              None
    {"list": [...]}, {"tuple": [...]}
    {"dict": [[key, ...], ...]} a dict, or the fields of any other node
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError
from pax_export.core import path_name

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\-]")


def dotted(top: str, path: Sequence[Any]) -> str:
    """``top`` and a jax key path, with dots: ``"batch.images.0"``."""
    rest = path_name(tuple(path))
    return ".".join(part for part in (top, rest) if part)


def legal_names(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Names that TensorFlow takes, all different, equal to the given where it can be.

    Args:
        names: the names that are wished for.
        fold: names are different if what this makes of them is.

    Example:
        >>> legal_names(["a.b", "a.b", "_state", "my weight"])
        ['a.b', 'a.b-1', 'state', 'my_weight']
    """
    taken: set[str] = set()
    result = []
    for name in names:
        legal = _ILLEGAL.sub("_", name).lstrip("_.-") or "value"
        candidate, number = legal, 0
        while fold(candidate) in taken:
            number += 1
            candidate = f"{legal}-{number}"
        taken.add(fold(candidate))
        result.append(candidate)
    return result


def signature_names(names: Iterable[str]) -> list[str]:
    """Legal names for inputs or outputs of a signature.

    TensorFlow writes a dot as an underscore in places and knows no capitals in
    others, so names that differ in no more than that are numbered.

    Example:
        >>> signature_names(["x", "X", "a.b", "a_b"])
        ['x', 'X-1', 'a.b', 'a_b-1']
    """
    return legal_names(names, lambda name: re.sub(r"[.\-]", "_", name).lower())


def describe(tree: Any, names: Iterable[str]) -> dict[str, Any]:
    """The structure of a pytree as plain data; its leaves, in order, get the names."""
    return _describe(tree, iter(names))


def _describe(tree: Any, names: Any) -> dict[str, Any]:
    if tree is None:
        return {"none": True}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if [path for path, _ in children] == [()]:
        return {"leaf": next(names)}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_describe(child, names) for _, child in children]}
    return {"dict": [[_key(path[0]), _describe(child, names)] for path, child in children]}


def _key(entry: Any) -> Any:
    key = getattr(entry, "key", None)  # of a dict; int keys stay ints in JSON lists
    return key if isinstance(key, (str, int)) else dotted("", (entry,))


def tree_names(tree: Any, bare: str) -> tuple[str, ...]:
    """Names for the leaves of a pytree, made of their paths.

    Args:
        tree: any pytree.
        bare: what is called this is the tree itself, if it is a leaf, and what
            the names of the members of a list or tuple begin with.

    Example:
        >>> tree_names({"a": 1, "b": (2, 3)}, "output"), tree_names((1, 2), "output")
        (('a', 'b.0', 'b.1'), ('output.0', 'output.1'))
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(
        signature_names(
            dotted(bare if not path or hasattr(path[0], "idx") else "", path) for path, _ in paths
        )
    )


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
    """Puts the arrays of a nested value under their names into a dict.

    Raises:
        InvalidArgumentError: the value has another structure.
    """
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
