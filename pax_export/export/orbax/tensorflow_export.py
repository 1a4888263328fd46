"""TensorFlowExport, as newer versions of orbax.export name it."""

from __future__ import annotations

from typing import Any

from pax_export.export.orbax.export_manager import ExportManager

__all__ = ["TensorFlowExport"]


class TensorFlowExport(ExportManager):
    """An `ExportManager`.

    Example:
        >>> TensorFlowExport.__mro__[1].__name__
        'ExportManager'
    """

    def tf_export_module(self) -> Any:
        """The `tf.Module` that is saved."""
        return self.tf_module
