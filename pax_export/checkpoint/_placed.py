"""Places restored arrays by a target, or by sharding rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export._types import AnyMesh, PyTree
from pax_export.checkpoint._saved import LeafEntry, is_plain
from pax_export.sharding import following, shardings
from pax_export.weights import LoadReport, chosen_sharding, refuse_narrowing


class Restored(dict[str, Any]):
    """The result of `Checkpoints.restore`: the trees by name, and a report.

    Attributes:
        step: the step of the checkpoint.
        metrics: the metrics saved with it.
        report: the names of loaded and of mismatched leaves.

    Example:
        >>> from pax_export.checkpoint import Restored
        >>> from pax_export.weights import LoadReport
        >>> state = Restored({"rng": 0}, 10, {"loss": 0.5}, LoadReport(("rng",), (), (), {}))
        >>> state["rng"], state.step, state.report.complete
        (0, 10, True)
    """

    def __init__(
        self, trees: Mapping[str, Any], step: int, metrics: Mapping[str, float], report: LoadReport
    ):
        super().__init__(trees)
        self.step = step
        self.metrics = dict(metrics)
        self.report = report


def sharding_to_read(name: str, own: object, entry: LeafEntry, sharding: object) -> Any:
    """Returns the sharding for reading an array; None to read it as numpy first."""
    if isinstance(own, (np.ndarray, np.generic)):
        return None
    refuse_narrowing(name, own)
    return None if entry.stored_as_another else sharding or chosen_sharding(own)


def place_array(array: PyTree, own: PyTree, sharding: object) -> Any:
    """Converts a restored array to the type and sharding of the target's leaf."""
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


#: The tree whose rules also apply to the others.
MODEL = "model"


def shardings_of(
    targets: Mapping[str, Any], mesh: AnyMesh | None, rules: object
) -> dict[str, list[Any]]:
    """Returns the shardings of the leaves of each tree in tree order; empty without a mesh."""
    if mesh is None:
        if rules is not None:
            raise InvalidArgumentError(
                "Sharding rules need a mesh.",
                where="restore",
                write="restore(mesh=mesh, rules=rules, model=model)",
            )
        return {}
    places = {}
    for tree, target in targets.items():
        follows = tree != MODEL and MODEL in targets
        chosen = following(targets[MODEL], rules) if follows else rules
        # Rules need shapes, which Python numbers have not.
        shapes = jax.tree_util.tree_map(
            lambda leaf: np.zeros((), np.int32) if is_plain(leaf) else leaf, target
        )
        places[tree] = jax.tree_util.tree_leaves(shardings(shapes, mesh, chosen))
    return places
