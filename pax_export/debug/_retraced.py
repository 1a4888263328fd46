"""`why_retraced`: explains why a function was traced again."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax

from pax_export._errors import RetracingWarning
from pax_export._types import PyTree
from pax_export.core import is_array, named_leaves, static_key, structure_differences

_SHOWN = 8


def why_retraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that each retrace issues a warning with its reason.

    It compares arguments as `jax.jit` does: their structure, with the static data of modules, and
    the shapes, dtypes and weak types of arrays. Each call that differs from all earlier ones issues
    a `RetracingWarning`, which compares it with the most similar call.

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
          write: arguments with equal structure, static data, shapes and dtypes
    """
    seen: dict[Any, dict[str, Any]] = {}

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Any:
        named = _named_arguments(function, args, kwargs)
        key = _cache_key(named)
        if key not in seen:
            now = _abstract_tree(named)
            if seen:
                _warn(function, min((_differences(old, now) for old in seen.values()), key=len))
            seen[key] = now
        return function(*args, **kwargs)

    return wrapper


def _named_arguments(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {str(number): value for number, value in enumerate(args)} | kwargs


def _cache_key(tree: PyTree) -> Any:
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    return treedef, tuple([_leaf_kind(leaf) for leaf in leaves])


def _leaf_kind(leaf: object) -> Any:
    """Returns the key of a leaf in jax's cache; for a static argument, its type and value."""
    if is_array(leaf) or isinstance(leaf, (bool, int, float, complex)):
        shaped = jax.typeof(leaf)
        return shaped.shape, str(shaped.dtype), bool(getattr(shaped, "weak_type", False))
    return static_key(leaf)


def _abstract_tree(tree: PyTree) -> Any:
    """The tree without its data, to be compared with later ones."""
    return jax.tree_util.tree_map(
        lambda x: (
            jax.ShapeDtypeStruct(*_leaf_kind(x)[:2], weak_type=_leaf_kind(x)[2])
            if is_array(x) or isinstance(x, (bool, int, float, complex))
            else x
        ),
        tree,
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    lines = [
        line.replace(" against ", " before, ") + " now" for line in structure_differences(old, new)
    ]
    if lines:
        return lines
    pairs = zip(named_leaves(old), named_leaves(new))
    return [
        f"{path}: {_leaf_text(a)} before, {_leaf_text(b)} now"
        for (path, a), (_, b) in pairs
        if _describe_leaf(a) != _describe_leaf(b)
    ]


def _describe_leaf(leaf: object) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype), leaf.weak_type
    return static_key(leaf)


def _leaf_text(leaf: object) -> str:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return repr(leaf)
    shape = ",".join(map(str, leaf.shape))
    return f"{leaf.dtype}[{shape}]" + (" (weak: a Python number)" if leaf.weak_type else "")


def _without_addresses(line: str) -> str:
    """The line without addresses of objects, which mean nothing to a reader."""
    line = re.sub(r" at 0x[0-9a-f]+", "", line)
    same = re.fullmatch(r"(.*?): (.*) before, \2 now", line, re.DOTALL)
    return f"{same[1]}: another {same[2]} than before" if same else line


def _warn(function: Callable, differences: list[str]) -> None:
    more = len(differences) - _SHOWN
    shown = [_without_addresses(line) for line in differences[:_SHOWN]] + (
        [f"and {more} more"] if more > 0 else []
    )
    warning = RetracingWarning(
        "A function is retraced.",
        where=getattr(function, "__name__", type(function).__name__),
        got="; ".join(shown) or "static data that cannot be compared",
        write="arguments with equal structure, static data, shapes and dtypes",
    )
    warnings.warn(warning, stacklevel=3)
