"""Selects modules of a net, as `Module.at` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten_with_path

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.core import Module, Selection, is_node, join, path_name

Target = type[Module] | str | Callable[..., Any] | Selection


def chosen(net: PyTree, targets: object, where: str) -> list[tuple[str, Any]]:
    """Returns the selected modules, also those in selected containers, with their paths.

    Raises:
        InvalidArgumentError: nothing matches, or only arrays and other values.
    """
    if isinstance(targets, (tuple, list)) and not targets:
        return []
    try:
        selection = Selection.of(net, targets)
    except InvalidArgumentError as error:
        error.where = f"{where}, in {error.where}"
        raise
    found: dict[str, Any] = {}
    for name, part in selection.items():
        for path, item in tree_flatten_with_path(part, is_leaf=is_node)[0]:
            if is_node(item):
                below = path_name(path)
                found[join(name, below) if below else name] = item
    if not found:
        raise InvalidArgumentError(
            "There are no modules among the parts that are chosen.",
            where=where,
            got=", ".join(selection.names())[:200],
            write="the paths or classes of modules, as net.at(...) takes them",
        )
    return list(found.items())
