"""What jax runs: values under transformations, the active trace, and hooks on operations."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer
from jax.typing import DTypeLike

from pax_export._foundations.jax._private import private, say_less

#: The class of jax's operations.  jax.extend.core has it too, and loads Pallas with it,
#: which takes a quarter of our own import time.
Primitive: Any = type(jax.lax.add_p)


def is_tracer(value: object) -> bool:
    """Returns whether a value is a tracer of jax."""
    return isinstance(value, Tracer)


def is_key(dtype: DTypeLike) -> bool:
    """Whether this is the dtype of typed random keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_mapped(value: object) -> bool:
    """Returns whether `jax.vmap`, as the innermost transformation, maps over a value."""
    return type(value).__name__ == "BatchTracer"


@functools.cache
def find_trace() -> Any:
    """Finds the current trace by public API only: an operation that reports its trace."""

    class Asking(Primitive):
        def bind_with_trace(self, trace: object, *_: object) -> weakref.ref:
            return weakref.ref(trace)

    ask = Asking("pax_export_trace").bind
    try:
        return ask if isinstance(ask(), weakref.ref) else None
    except Exception:  # whatever jax raises for an unknown operation
        return None


def _return_nothing() -> None:
    """A fallback for which all traces are the same."""
    say_less("jax.lax.add_p")


def _trace_state() -> Any:
    found = private("jax._src.core.get_opaque_trace_state")
    return found or find_trace() or _return_nothing


#: Equal at two places if and only if they run under the same trace.
trace_state = _trace_state()


# --- hooks on every program and eager operation ----------------------------------------

_CURRENT, _SET = "jax._src.core.eval_trace", "jax._src.core.set_current_trace"

#: A function: its operation, parameters, operands and results.
Heard = Callable[[Any, dict[str, Any], Sequence[Any], Sequence[Any]], None]


def is_computing() -> bool:
    """False inside of a function that jax traces: under jit, grad, vmap."""
    plain, ask = private(_CURRENT), find_trace()
    return plain is None or ask is None or isinstance(ask()(), type(plain))


@contextmanager
def watch_operations(heard: Heard) -> Iterator[None]:
    """Context manager that reports this thread's computations to ``heard``.

    A jitted function is one operation. Tracing, and computations of ``heard``, are excluded.
    """
    plain, entered = private(_CURRENT), private(_SET)
    if plain is None or entered is None:
        say_less(_CURRENT if plain is None else _SET)
        with jax.debug_nans(True):
            yield
        return

    class Watching(type(plain)):  # type: ignore[misc]
        """Evaluates operations as jax does, and reports them."""

        def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
            params = _without_donation(params)
            found = plain.process_primitive(primitive, args, params)
            with entered(plain):
                heard(primitive, params, args, found if primitive.multiple_results else [found])
            return found

    with entered(Watching()):
        yield


def _without_donation(params: dict[str, Any]) -> dict[str, Any]:
    """Removes donation, because operands are inspected if results are wrong."""
    if not any(params.get("donated_invars", ())):
        return params
    return {**params, "donated_invars": (False,) * len(params["donated_invars"])}


def jitted_call() -> tuple[Any, tuple, dict[str, Any]] | None:
    """The function of the innermost running `jax.jit` call, from its frame, and the arguments.

    None for functions of jax, tracers as arguments, and other ways to call it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "cache_miss" and frame.f_globals["__name__"].startswith("jax."):
            there = frame.f_locals
            function, args, kwargs = (there.get(name) for name in ("fun", "args", "kwargs"))
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            own = str(getattr(function, "__module__", "")).startswith("jax.")
            if own or not callable(function) or any(map(is_tracer, leaves)):
                return None
            return function, args or (), kwargs or {}
        frame = frame.f_back
    return None
