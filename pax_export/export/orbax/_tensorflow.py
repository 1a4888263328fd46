"""Imports TensorFlow: the classes of this package derive from `tf.Module`."""

from __future__ import annotations

from typing import Any

from pax_export._optional import require

tf: Any = require("tensorflow", "tensorflow", "pax_export.export.orbax")
