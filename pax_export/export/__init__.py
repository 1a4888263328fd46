"""Exports models to SavedModel, StableHLO, TFLite, ONNX, PyTorch and folders for browsers.

Example:
    >>> import pax_export as pax
    >>> pax.export.spec("batch, 3").shape
    'batch, 3'
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING, Any

from pax_export._foundations.optional import require

if TYPE_CHECKING:
    from pax_export.export import formats, orbax, symbolic_numpy
    from pax_export.export.artifact.calling import LoadedFile
    from pax_export.export.artifact.loading import load
    from pax_export.export.artifact.options import ExportOptions
    from pax_export.export.artifact.report import Report
    from pax_export.export.formats.onnx.export import to_onnx
    from pax_export.export.formats.onnx.web.export import to_web
    from pax_export.export.formats.saved_model.export import to_saved_model
    from pax_export.export.formats.saved_model.load import LoadedModel
    from pax_export.export.formats.stablehlo.bundle import LoadedBundle
    from pax_export.export.formats.stablehlo.export import to_stablehlo
    from pax_export.export.formats.stablehlo.files import renew
    from pax_export.export.formats.tflite.export import to_tflite
    from pax_export.export.formats.torch.export import as_torch, to_torch
    from pax_export.export.orbax import ExportManager, JaxModule, ServingConfig
    from pax_export.export.retargeting.retarget import RetargetReport, retarget
    from pax_export.export.tracing.inputs import spec

# Names are loaded when first used, from where they are imported above: a program pays for the
# formats that it writes, and a process that serves an export may not have jax.
_SOURCE = (pkgutil.get_data(__name__, "__init__.py") or b"").decode()
_HOMES = {
    name: home
    for home, names in re.findall(r"from (pax_export\.export[.\w]*) import (.+)", _SOURCE)
    for name in names.split(", ")
}
_WITHOUT_JAX = ("ExportOptions", "LoadedModel", "Report", "load")

__all__ = [
    "ExportManager",
    "ExportOptions",
    "JaxModule",
    "LoadedBundle",
    "LoadedFile",
    "LoadedModel",
    "Report",
    "RetargetReport",
    "ServingConfig",
    "as_torch",
    "formats",
    "load",
    "orbax",
    "renew",
    "retarget",
    "spec",
    "symbolic_numpy",
    "to_onnx",
    "to_saved_model",
    "to_stablehlo",
    "to_tflite",
    "to_torch",
    "to_web",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _home_of_writer(name)
    if not home:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_JAX:
        require("jax", "all", f"pax_export.export.{name}")
    if home == __name__:
        return importlib.import_module(f"{home}.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # so that this function is not asked again
    return value


def _home_of_writer(name: str) -> str:
    """The module of ``to_…`` of a format that is in no list, which its row has."""
    if not name.startswith("to_"):
        return ""
    rows = importlib.import_module(f"{__name__}.artifact.formats").own_formats().values()
    return next((row.export.partition(":")[0] for row in rows if row.exporter == name), "")


def __dir__() -> list[str]:
    return sorted(__all__)
