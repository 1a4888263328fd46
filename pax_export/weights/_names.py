"""Names of leaves: dotted paths, each for one leaf."""

from __future__ import annotations

from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from pax_export._errors import WeightNameError
from pax_export.core import named_leaves

# The one name that a safetensors file keeps for itself.
RESERVED = "__metadata__"


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their dotted names, in tree order.

    Raises:
        WeightNameError: two leaves have one name, or a leaf has none.

    Example:
        >>> import pax_export as pax
        >>> list(leaves_by_name(pax.Sequential(pax.Linear(1, 2))))
        ['modules.0.weight', 'modules.0.bias']
    """
    pairs = named_leaves(tree)
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        raise _shared_name(tree, [name for name, _ in pairs])
    for name in leaves.keys() & {"", RESERVED}:
        raise WeightNameError(
            "A weight needs a name of its own in the file.",
            got=f"a leaf with the name {name!r}",
            write="a module, or a dict of arrays with other names",
        )
    return leaves


def _shared_name(tree: Any, names: list[str]) -> WeightNameError:
    name = next(name for name in names if names.count(name) > 1)
    items, _ = tree_flatten_with_path(tree)
    paths = [keystr(path) for (path, _), other in zip(items, names) if other == name]
    return WeightNameError(
        "Two weights have one dotted name, so a file could not tell them apart.",
        where=name,
        got=f"the paths {' and '.join(paths)}",
        write="dict keys without dots, or with other names",
    )
