"""Names of inputs, outputs and variables, and static Python values among the arguments."""

from __future__ import annotations

import enum
import functools
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import jax
import numpy as np

from pax_export._foundations.types import PyTree
from pax_export.core import LeafValue, path_name
from pax_export.export.artifact.calling import tensorflow_keyword

T = TypeVar("T")

_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\-]")


def dotted_name(top: str, path: Sequence[Any]) -> str:
    """``top`` and a jax key path, with dots: ``"batch.images.0"``."""
    rest = path_name(tuple(path))
    return ".".join(part for part in (top, rest) if part)


def legal_names(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Returns distinct names that TensorFlow accepts; `fold` defines which are equal.

    Example:
        >>> legal_names(["a.b", "a.b", "_state", "my weight"])
        ['a.b', 'a.b-1', 'state', 'my_weight']
    """
    legal = (_ILLEGAL.sub("_", name).lstrip("_.-") or "value" for name in names)
    return distinct_names(legal, fold)


def distinct_names(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Returns the names, with a number after those that are equal to an earlier one by `fold`."""
    result: dict[str, str] = {}  # by what `fold` makes of them
    for name in names:
        candidate, number = name, 0
        while fold(candidate) in result:
            number += 1
            candidate = f"{name}-{number}"
        result[fold(candidate)] = candidate
    return list(result.values())


def signature_names(names: Iterable[str]) -> list[str]:
    """Names of inputs or outputs that stay distinct where TensorFlow folds dots and capitals.

    Example:
        >>> signature_names(["x", "X", "a.b", "a_b"])
        ['x', 'X-1', 'a.b', 'a_b-1']
    """
    return legal_names(names, lambda name: tensorflow_keyword(name).lower())


def describe_structure(tree: PyTree, names: Iterable[str]) -> dict[str, Any]:
    """The structure of a pytree as plain data; its leaves, in order, get the names."""
    names = iter(names)
    if tree is None:
        return {"none": True}
    if isinstance(tree, Static):
        return {"static": describe_value(tree.value)}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if [path for path, _ in children] == [()]:
        return {"leaf": next(names)}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [describe_structure(child, names) for _, child in children]}
    return {
        "dict": [[_key_of(path[0]), describe_structure(child, names)] for path, child in children]
    }


def _key_of(entry: Any) -> Any:
    key = getattr(entry, "key", None)  # of a dict; int keys stay ints in JSON lists
    return key if isinstance(key, (str, int)) else dotted_name("", (entry,))


def tree_names(tree: PyTree, bare: str) -> tuple[str, ...]:
    """Legal names for the leaves of a pytree, by `dotted_paths`.

    Example:
        >>> tree_names({"a": 1, "b": (2, 3)}, "output"), tree_names((1, 2), "output")
        (('a', 'b.0', 'b.1'), ('output.0', 'output.1'))
    """
    return tuple(signature_names(dotted_paths(tree, bare)))


def dotted_paths(tree: PyTree, bare: str) -> tuple[str, ...]:
    """Names for the leaves of a pytree by path; `bare` names the root and members of a sequence."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(
        dotted_name(bare if not path or hasattr(path[0], "idx") else "", path) for path, _ in paths
    )


# --- Static Python values among the arguments, hidden from jax in the tree structure ---


class Static:
    """A value instead of a leaf: a node of the tree that has no leaves."""

    def __init__(self, value: object):
        self.value = value


jax.tree_util.register_pytree_node(
    Static, lambda static: ((), LeafValue(static.value)), lambda known, _: Static(known.value)
)


def wrap_static(tree: T, is_static: Callable[[Any], bool]) -> T:
    """Wraps the static leaves of a tree; returns the same object if there are none."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not any(map(is_static, leaves)):
        return tree
    wrapped = [Static(leaf) if is_static(leaf) else leaf for leaf in leaves]
    return jax.tree_util.tree_unflatten(structure, wrapped)


def unwrap_static(tree: T) -> T:
    """The tree with the hidden leaves in their places."""
    return jax.tree_util.tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Static) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Static),
    )


def is_no_array(value: object) -> bool:
    """Whether a leaf of params is neither an array nor a number, nor something that is like one."""
    if isinstance(value, bool):
        return True  # a flag, which Python decides with
    number = isinstance(value, (int, float, complex, np.generic))
    return not (number or (hasattr(value, "shape") and hasattr(value, "dtype")))


#: Values that Python branches on, and that are no arrays.
_SWITCHES = (bool, str, bytes, enum.Enum, type, np.dtype)


def is_switch(value: object) -> bool:
    """Whether an argument is a Python value that is no input: a flag, a name, a function."""
    if isinstance(value, str):
        return "," not in value  # with one, it was to be a shape
    return isinstance(value, _SWITCHES) or (callable(value) and not hasattr(value, "shape"))


def is_fixed(value: object) -> bool:
    """Whether a keyword argument is a Python value that is no input; a number is one, too."""
    number = isinstance(value, (int, float, complex)) and not isinstance(value, np.generic)
    return number or is_switch(value)


_LARGEST = 2**53


def describe_value(value: Any) -> dict[str, Any]:
    """Returns a Python value for a report: itself if it is plain data, otherwise its name."""
    plain = type(value) in (bool, str) or (
        type(value) in (int, float) and abs(value) < _LARGEST  # NaN and infinity are no JSON
    )
    if plain:
        return {"value": value}
    name = getattr(value, "__qualname__", None)
    return {"text": f"{getattr(value, '__module__', '')}.{name}" if name else str(value)}


# --- functions ---


class BoundMethod(Protocol):
    """A bound method of Python or of Equinox."""

    __self__: Any
    __func__: Callable[..., Any]


NAMELESS = "function"


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a callable."""
    if is_bound_method(function):
        return function_name(function.__self__)
    inner = function.func if is_partial(function) else getattr(function, "__wrapped__", None)
    if inner is not None:
        return function_name(inner)
    name = getattr(function, "__name__", type(function).__name__)
    return NAMELESS if name == "<lambda>" else name


def is_bound_method(value: object) -> TypeGuard[BoundMethod]:
    return isinstance(value, types.MethodType) or (
        hasattr(value, "__self__") and hasattr(value, "__func__")  # as in equinox
    )


def is_partial(value: object) -> TypeGuard[functools.partial[Any]]:
    alike = all(hasattr(value, name) for name in ("func", "args", "keywords"))  # as in equinox
    return isinstance(value, functools.partial) or alike
