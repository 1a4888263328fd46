"""TensorFlowModule, as newer versions of orbax.export name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pax_export.export.orbax import constants
from pax_export.export.orbax.jax_module import JaxModule
from pax_export.export.orbax.typing import ApplyFn, PyTree

__all__ = ["TensorFlowModule"]


class TensorFlowModule(JaxModule):
    """A `JaxModule` that is made with keyword arguments alone.

    Args:
        params: any pytree.
        apply_fn: a function of the params and one input, or several by their keys.
        **kwargs: the other arguments of `JaxModule`.

    Example:
        >>> TensorFlowModule({"w": 1.0}, lambda params, x: x * params["w"]).with_gradient
        False
    """

    def __init__(self, params: PyTree, apply_fn: ApplyFn | Mapping[str, ApplyFn], **kwargs: Any):
        super().__init__(params, apply_fn, **kwargs)

    def export_version(self) -> constants.ExportModelType:  # type: ignore[override]
        """The type of the written model: a SavedModel."""
        return constants.ExportModelType.TF_SAVEDMODEL
