"""Everything that depends on JAX versions or private JAX APIs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax

from pax_export._foundations.jax._trace import Primitive as Primitive
from pax_export._foundations.jax._trace import is_computing as is_computing
from pax_export._foundations.jax._trace import is_key as is_key
from pax_export._foundations.jax._trace import is_mapped as is_mapped
from pax_export._foundations.jax._trace import is_tracer as is_tracer
from pax_export._foundations.jax._trace import jitted_call as jitted_call
from pax_export._foundations.jax._trace import trace_state as trace_state
from pax_export._foundations.jax._trace import watch_operations as watch_operations

#: Whether CPUs are fast at adding rows of a matrix one by one, and at blocks of bfloat16: with
#: jax 0.10 both take 1.1 to 3 times as long (docs/decisions/quantization.md).
ADDS_ROWS_FAST = jax.__version_info__ >= (0, 12)

if TYPE_CHECKING:
    from pax_export._foundations.jax._programs import call_part as call_part
    from pax_export._foundations.jax._programs import call_with_constants as call_with_constants
    from pax_export._foundations.jax._programs import equations_of as equations_of
    from pax_export._foundations.jax._programs import find_expansion as find_expansion
    from pax_export._foundations.jax._programs import find_sparse as find_sparse
    from pax_export._foundations.jax._programs import needed_part as needed_part
    from pax_export._foundations.jax._programs import read_arguments as read_arguments
    from pax_export._foundations.jax._programs import run_inside as run_inside
    from pax_export._foundations.jax._programs import scan_operands as scan_operands
    from pax_export._foundations.jax._programs import scope_constraints as scope_constraints
    from pax_export._foundations.jax._programs import without_references as without_references

# Every program imports this package; only exporters need the rest.
_PROGRAMS = frozenset(
    "call_part call_with_constants equations_of find_expansion find_sparse needed_part "
    "read_arguments run_inside scan_operands scope_constraints without_references".split()
)


def __getattr__(name: str) -> Any:
    if name not in _PROGRAMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}._programs"), name)
