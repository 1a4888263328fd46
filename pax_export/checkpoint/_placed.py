"""Arrays of a checkpoint, of the kind and at the place that a target names, or rules on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export.checkpoint._saved import Entry, is_plain
from pax_export.sharding import following, shardings
from pax_export.weights import LoadReport, chosen_sharding, refuse_narrowing


class Restored(dict[str, Any]):
    """What `Checkpoints.restore` gives: the trees by name, and what it found.

    Attributes:
        step: of the checkpoint.
        metrics: that were saved with it.
        report: names of what was loaded, and of what did not fit.

    Example:
        >>> from pax_export.checkpoint import Restored
        >>> from pax_export.weights import LoadReport
        >>> state = Restored({"rng": 0}, 10, {"loss": 0.5}, LoadReport(("rng",), (), (), {}))
        >>> state["rng"], state.step, state.report.complete
        (0, 10, True)
    """

    def __init__(
        self,
        trees: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float],
        report: LoadReport,
    ):
        super().__init__(trees)
        self.step = step
        self.metrics = dict(metrics)
        self.report = report


def sharding_to_read(name: str, own: Any, entry: Entry, sharding: Any) -> Any:
    """The sharding that an array is read with; None if it is read as one of numpy first."""
    if isinstance(own, (np.ndarray, np.generic)):
        return None
    refuse_narrowing(name, own)
    return None if entry.stored_as_another else sharding or chosen_sharding(own)


def placed(array: Any, own: Any, sharding: Any) -> Any:
    """An array that was read, of the kind of the target's leaf, and where it is."""
    if is_plain(own):
        return array
    if isinstance(own, np.generic):
        return array[()]
    if isinstance(own, np.ndarray):
        return array.astype(own.dtype, copy=False)
    if isinstance(array, jax.Array) and array.committed:
        return array  # read as shards already
    sharding = sharding or chosen_sharding(own)
    return jax.device_put(array) if sharding is None else jax.device_put(array, sharding)


#: The tree whose rules the others follow.
MODEL = "model"


def shardings_of(targets: Mapping[str, Any], mesh: Any, rules: Any) -> dict[str, list[Any]]:
    """The sharding of each leaf of each tree, in tree order; none without a mesh."""
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
