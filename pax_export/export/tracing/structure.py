"""Nested values, written down as plain data, with a flat name for each array.

`_nested` says how they are written, and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

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
    legal = (_ILLEGAL.sub("_", name).lstrip("_.-") or "value" for name in names)
    return distinct(legal, fold)


def distinct(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """The names, with a number after those that are there already, as `fold` makes them."""
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 0
        while fold(candidate) in taken:
            number += 1
            candidate = f"{name}-{number}"
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
