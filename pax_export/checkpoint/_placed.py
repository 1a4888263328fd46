"""Arrays of a checkpoint, of the kind and at the place that a target names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentTypeError
from pax_export.checkpoint._saved import Entry, is_plain
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


def require_target(name: str, leaf: Any) -> None:
    """Refuses a leaf that says nothing of what is to be restored.

    Raises:
        InvalidArgumentTypeError: naming it.
    """
    if not (is_plain(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        raise InvalidArgumentTypeError(
            "Restoring needs a tree of arrays, or of their shapes and dtypes.",
            where=name,
            got=f"{type(leaf).__name__}: {leaf!r}"[:200],
            write="a module, or jax.eval_shape(make_model)",
        )


def sharding_to_read(name: str, own: Any, entry: Entry, sharding: Any) -> Any:
    """The sharding that an array is read with; None if it is read as one of numpy first.

    Args:
        name: of the leaf.
        own: the leaf of the target.
        entry: what it was when it was saved.
        sharding: where the user wants it, if not where the target is.

    Raises:
        UnsupportedDtypeError: jax would narrow it.
    """
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
