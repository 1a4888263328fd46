"""`why_retraced`: explains why a function was traced again."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

from pax_export._foundations.errors import RetracingWarning
from pax_export._foundations.types import ArrayLike
from pax_export.core import named_leaves, static_key, structure_differences
from pax_export.debug._nans import is_data

_SHOWN = 8

P = ParamSpec("P")
R = TypeVar("R")


def why_retraced(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that each retrace issues a warning with its reason.

    It compares arguments as `jax.jit` does: their structure, with the static data of modules, and
    the shapes, dtypes and weak types of arrays. Each call that differs from all earlier ones issues
    a `RetracingWarning`, which compares it with the most similar call. So does each call that jax
    traces although only a static argument differs, or nothing: then a function was made anew.

    Args:
        function: usually a jitted one.

    Returns:
        A function with the same arguments and results.

    Example:
        >>> import warnings, jax, jax.numpy as jnp, pax_export as pax
        >>> step = pax.debug.why_retraced(jax.jit(lambda net, x: net(x)))
        >>> net = pax.Dropout(0.1).eval()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = step(net, jnp.ones(2)), step(net, jnp.ones(3)), step(net, jnp.ones(3))
        >>> print(caught[0].message)
        A function is retraced.
          where: <lambda>
          got: x: float32[2] before, float32[3] now
          fix: arguments with equal structure, static data, shapes and dtypes
    """
    seen: dict[Any, list[SeenCall]] = {}
    code = _code_of(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        named = _named_arguments(function, args, kwargs)
        key, now = (
            _cache_key(named),
            SeenCall(_abstract_tree(named), _numbers(named), sorted(kwargs)),
        )
        with _names_of_traces() as traced:
            result = function(*args, **kwargs)
        before = [each for calls in seen.values() for each in calls]
        known = _called.setdefault(code, set()) if code is not None else set()
        if traced and (key in seen or (not before and key in known)):
            _warn_of_equal_call(function, seen.get(key, ()), now, traced)
        elif before and key not in seen:
            _warn(function, min((_differences(old.tree, now.tree) for old in before), key=len))
        if traced or key not in seen:
            seen.setdefault(key, []).append(now)
        known.add(key)
        return result

    return wrapper


class SeenCall(NamedTuple):
    """The arguments of one call."""

    tree: Any  # shapes, dtypes and static data
    numbers: dict[str, Any]  # Python numbers by path, which may be static arguments
    keywords: list[str]


#: The arguments with which functions of some code were called, by any of their wrappers.
_called: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
_traces: ContextVar[list[str] | None] = ContextVar("pax_export_traces", default=None)


def _code_of(function: Callable[..., Any]) -> Any:
    """Returns the code of a function, also behind `jax.jit` and partials, or None."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return getattr(function, "__code__", None)


@contextmanager
def _names_of_traces() -> Iterator[list[str]]:
    """Lists the functions that jax traces in the block."""
    _listen()
    names: list[str] = []
    token = _traces.set(names)
    try:
        yield names
    finally:
        _traces.reset(token)


@functools.cache
def _listen() -> None:
    def heard(event: str, duration_secs: float, **details: Any) -> None:
        names = _traces.get()
        if names is not None and event.endswith("/jaxpr_trace_duration"):
            names.append(str(details.get("fun_name", "a function")))

    jax.monitoring.register_event_duration_secs_listener(heard)


def _numbers(named: dict[str, Any]) -> dict[str, Any]:
    return {
        path: leaf
        for path, leaf in named_leaves(named)
        if isinstance(leaf, (bool, int, float, complex))
    }


def _warn_of_equal_call(
    function: Callable, before: Sequence[SeenCall], now: SeenCall, traced: list[str]
) -> None:
    """Warns of a trace for arguments that are arrays and static data as before."""
    static = [
        [f"{path}: {old.numbers[path]!r} before, {value!r} now, a static argument"
         for path, value in now.numbers.items() if old.numbers.get(path, value) != value]
        for old in before
    ]  # fmt: skip
    if static and all(static):
        _warn(function, min(static, key=len), "an array, jnp.asarray(...), for what changes")
    elif before and all(old.keywords != now.keywords for old in before):
        names = ", ".join(now.keywords) or "none"
        _warn(function, [f"equal arguments; by keyword now: {names}"], "one form for all calls")
    elif before and hasattr(function, "lower"):
        _warn(
            function,
            ["equal arguments; another configuration of jax, or its caches were cleared"],
            "one context for all calls, e.g. of jax.default_matmul_precision or jax.set_mesh",
        )
    else:
        _warn(
            function,
            [f"equal arguments; the function {traced[-1]} was made anew"],
            "jax.jit(...) once, outside of the loop or function that calls it",
        )


def _named_arguments(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {str(number): value for number, value in enumerate(args)} | kwargs


def _cache_key(named: dict[str, Any]) -> Any:
    leaves, treedef = jax.tree_util.tree_flatten(_abstract_tree(named))
    return treedef, tuple(map(static_key, leaves))


class _Shaped(str):
    """The dtype and shape of data, as text."""

    __repr__ = str.__str__


def _shaped(leaf: ArrayLike) -> _Shaped:
    kind = jax.typeof(leaf)
    weak = " (weak: a Python number)" if getattr(kind, "weak_type", False) else ""
    return _Shaped(f"{kind.dtype}[{','.join(map(str, kind.shape))}]{weak}")


def _abstract_tree(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments without their data, to be compared with later ones."""
    return jax.tree_util.tree_map(lambda x: _shaped(x) if is_data(x) else x, named)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    lines = [
        line.replace(" against ", " before, ") + " now" for line in structure_differences(old, new)
    ]
    if lines:
        return lines
    pairs = zip(named_leaves(old), named_leaves(new))
    return [
        f"{path}: {a!r} before, {b!r} now"
        for (path, a), (_, b) in pairs
        if static_key(a) != static_key(b)
    ]


def _without_addresses(line: str) -> str:
    """The line without addresses of objects, which mean nothing to a reader."""
    line = re.sub(r" at 0x[0-9a-f]+", "", line)
    same = re.fullmatch(r"(.*?): (.*) before, \2 now", line, re.DOTALL)
    return f"{same[1]}: another {same[2]} than before" if same else line


def _warn(
    function: Callable,
    differences: list[str],
    write: str = "arguments with equal structure, static data, shapes and dtypes",
) -> None:
    more = len(differences) - _SHOWN
    shown = [_without_addresses(line) for line in differences[:_SHOWN]] + (
        [f"and {more} more"] if more > 0 else []
    )
    warning = RetracingWarning(
        "A function is retraced.",
        where=getattr(function, "__name__", type(function).__name__),
        got="; ".join(shown) or "static data that cannot be compared",
        write=write,
    )
    warnings.warn(warning, stacklevel=3)
