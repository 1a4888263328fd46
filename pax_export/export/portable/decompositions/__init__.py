"""Decompositions of primitives, as functions of jax.

Each primitive is defined once for all targets, in any file of this folder; `registry` has the
table.
"""

import importlib
import pkgutil

from pax_export.export.portable.decompositions.registry import DECOMPOSITIONS as DECOMPOSITIONS
from pax_export.export.portable.decompositions.registry import (
    NotDecomposedError as NotDecomposedError,
)

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
