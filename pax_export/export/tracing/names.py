"""Names of inputs, outputs and variables, and the structure of pytrees for reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from pax_export._foundations.types import PyTree
from pax_export.core import path_name
from pax_export.export.artifact.arguments import tensorflow_keyword
from pax_export.export.tracing.static import Static, describe_value

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\-]")


def dotted_name(top: str, path: Sequence[Any]) -> str:
    """``top`` and a jax key path, with dots: ``"batch.images.0"``."""
    rest = path_name(tuple(path))
    return ".".join(part for part in (top, rest) if part)


def legal_names(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Returns distinct names that TensorFlow accepts; `fold` defines which are equal.

    Example:
        >>> legal_names(["a.b", "a.b", "_state", "my weight"])
        ['a.b', 'a.b-1', 'state', 'my_weight']
    """
    legal = (_ILLEGAL.sub("_", name).lstrip("_.-") or "value" for name in names)
    return distinct_names(legal, fold)


def distinct_names(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Returns the names, with a number after those that are equal to an earlier one by `fold`."""
    result: dict[str, str] = {}  # by what `fold` makes of them
    for name in names:
        candidate, number = name, 0
        while fold(candidate) in result:
            number += 1
            candidate = f"{name}-{number}"
        result[fold(candidate)] = candidate
    return list(result.values())


def signature_names(names: Iterable[str]) -> list[str]:
    """Names of inputs or outputs that stay distinct where TensorFlow folds dots and capitals.

    Example:
        >>> signature_names(["x", "X", "a.b", "a_b"])
        ['x', 'X-1', 'a.b', 'a_b-1']
    """
    return legal_names(names, lambda name: tensorflow_keyword(name).lower())


def describe_structure(tree: PyTree, names: Iterable[str]) -> dict[str, Any]:
    """The structure of a pytree as plain data; its leaves, in order, get the names."""
    names = iter(names)
    if tree is None:
        return {"none": True}
    if isinstance(tree, Static):
        return {"static": describe_value(tree.value)}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if [path for path, _ in children] == [()]:
        return {"leaf": next(names)}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [describe_structure(child, names) for _, child in children]}
    return {
        "dict": [[_key_of(path[0]), describe_structure(child, names)] for path, child in children]
    }


def _key_of(entry: Any) -> Any:
    key = getattr(entry, "key", None)  # of a dict; int keys stay ints in JSON lists
    return key if isinstance(key, (str, int)) else dotted_name("", (entry,))


def tree_names(tree: PyTree, bare: str) -> tuple[str, ...]:
    """Legal names for the leaves of a pytree, by `dotted_paths`.

    Example:
        >>> tree_names({"a": 1, "b": (2, 3)}, "output"), tree_names((1, 2), "output")
        (('a', 'b.0', 'b.1'), ('output.0', 'output.1'))
    """
    return tuple(signature_names(dotted_paths(tree, bare)))


def dotted_paths(tree: PyTree, bare: str) -> tuple[str, ...]:
    """Names for the leaves of a pytree by path; `bare` names the root and members of a sequence."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(
        dotted_name(bare if not path or hasattr(path[0], "idx") else "", path) for path, _ in paths
    )
