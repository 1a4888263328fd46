"""Hooks on every program and eager operation that JAX runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from pax_export._foundations.jax._private import private, say_less
from pax_export._foundations.jax._trace import find_trace, is_tracer

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
