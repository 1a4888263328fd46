"""The only file that knows versions of jax, or anything jax does not promise."""

from __future__ import annotations

from typing import Any

from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state as trace_state

__all__ = ["is_tracer", "trace_state"]


def is_tracer(value: Any) -> bool:
    """True for the stand-ins that jax passes to a function while it traces it."""
    return isinstance(value, Tracer)
