"""The functions in C, which are not used where ``PAX_EXPORT_PURE_PYTHON=1``."""

from __future__ import annotations

import importlib
import os
from typing import Any


def _load_compiled() -> Any:
    """Returns the compiled module, or None where it is missing or turned off."""
    if os.environ.get("PAX_EXPORT_PURE_PYTHON", "0") not in ("", "0"):
        return None
    try:
        return importlib.import_module("pax_export.core._round_trip")
    except ImportError:  # not compiled, or for another kind of machine
        return None


in_c = _load_compiled()
compiled = in_c is not None
