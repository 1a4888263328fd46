"""Exports of models to where they are served; one call each.

Example:
    >>> import pax_export as pax
    >>> pax.export.spec("batch, 3").shape
    'batch, 3'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pax_export._optional import is_installed, require
from pax_export.export.artifact.report import Report
from pax_export.export.formats.saved_model.load import LoadedModel
from pax_export.export.loading import load

# A process that serves what was exported may have no jax: it loads SavedModels, and no more.
if TYPE_CHECKING or is_installed("jax"):
    from pax_export.export.formats.loaded_file import LoadedFile
    from pax_export.export.formats.onnx.export import to_onnx
    from pax_export.export.formats.saved_model.export import to_saved_model
    from pax_export.export.formats.stablehlo.bundle import LoadedBundle
    from pax_export.export.formats.stablehlo.export import to_stablehlo
    from pax_export.export.formats.stablehlo.renew import renew
    from pax_export.export.formats.tflite.export import to_tflite
    from pax_export.export.retargeting.retarget import RetargetReport, retarget
    from pax_export.export.tracing.spec import spec

if TYPE_CHECKING:
    from pax_export.export import orbax
    from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig

# Loaded when first used: their classes derive from TensorFlow's.
_OF_ORBAX = ("ExportManager", "JaxModule", "ServingConfig")

__all__ = [
    "ExportManager",
    "JaxModule",
    "LoadedBundle",
    "LoadedFile",
    "LoadedModel",
    "Report",
    "RetargetReport",
    "ServingConfig",
    "load",
    "orbax",
    "renew",
    "retarget",
    "spec",
    "to_onnx",
    "to_saved_model",
    "to_stablehlo",
    "to_tflite",
]


def __getattr__(name: str) -> Any:
    if name == "orbax" or name in _OF_ORBAX:
        room = importlib.import_module(f"{__name__}.orbax")
        return room if name == "orbax" else getattr(room, name)
    if name in __all__:
        require("jax", "all", f"pax_export.export.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
