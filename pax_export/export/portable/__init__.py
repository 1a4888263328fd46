"""Passes over traced programs that every target shares: program of jax in, program of jax out."""

from pax_export.export.portable.decompose import decompose as decompose
from pax_export.export.portable.decompose import not_decomposed as not_decomposed
from pax_export.export.portable.decompositions import NotDecomposedError as NotDecomposedError
