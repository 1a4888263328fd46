"""Decompositions of primitives, as functions of jax.

Each primitive is defined once for all targets; `registry` has the table.
"""

from pax_export.export.portable.decompositions import (
    bits,
    control,
    convolutions,
    eigenvalues,
    elementary,
    indexing,
    linear_algebra,
    ordering,
    reductions,
    special_functions,
    windows,
)
from pax_export.export.portable.decompositions.registry import DECOMPOSITIONS as DECOMPOSITIONS
from pax_export.export.portable.decompositions.registry import (
    NotDecomposedError as NotDecomposedError,
)
