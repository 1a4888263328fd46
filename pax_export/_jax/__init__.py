"""The only room that knows versions of jax, or anything jax does not promise."""

from pax_export._jax._convolutions import symbolic_convolutions
from pax_export._jax._dimensions import scope_constraints
from pax_export._jax._platforms import allow_symbolic_padding, call_here, neutral_platform
from pax_export._jax._processes import Joined, devices_are_known, join_processes
from pax_export._jax._programs import (
    call_part,
    call_with_constants,
    needed_part,
    read_arguments,
)
from pax_export._jax._trace import Primitive, is_tracer, trace_state

__all__ = [
    "Joined",
    "Primitive",
    "allow_symbolic_padding",
    "call_here",
    "call_part",
    "call_with_constants",
    "devices_are_known",
    "is_tracer",
    "join_processes",
    "needed_part",
    "neutral_platform",
    "read_arguments",
    "scope_constraints",
    "symbolic_convolutions",
    "trace_state",
]
