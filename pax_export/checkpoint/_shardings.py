"""Where restored arrays go, if not where the targets are: rules on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export.checkpoint._saved import is_plain
from pax_export.sharding import following, shardings

#: The tree whose rules the others follow.
MODEL = "model"


def shardings_of(targets: Mapping[str, Any], mesh: Any, rules: Any) -> dict[str, list[Any]]:
    """The sharding of each leaf of each tree, in tree order; none without a mesh.

    Raises:
        InvalidArgumentError: there are rules, and no mesh.
        ShardingError: a rule is for no leaf, or does not fit.
    """
    if mesh is None:
        if rules is not None:
            raise InvalidArgumentError(
                "Rules say how leaves lie on a mesh, and there is none.",
                where="restore",
                write="restore(mesh=mesh, rules=rules, model=model)",
            )
        return {}
    places = {}
    for tree, target in targets.items():
        follows = tree != MODEL and MODEL in targets
        chosen = following(targets[MODEL], rules) if follows else rules
        shapes = jax.tree_util.tree_map(_as_array, target)
        places[tree] = jax.tree_util.tree_leaves(shardings(shapes, mesh, chosen))
    return places


def _as_array(leaf: Any) -> Any:
    """What has no shape is a number here: it has a place among the leaves, and no use for it."""
    return np.zeros((), np.int32) if is_plain(leaf) else leaf
