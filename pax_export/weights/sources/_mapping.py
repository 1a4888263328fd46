"""Arrays in memory: mappings, modules and other pytrees."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError, WeightsFileError, a_few
from pax_export._foundations.jax import is_key, is_tracer
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.core import join_path
from pax_export.weights._save_load import leaves_by_name
from pax_export.weights.sources._source import Entry, Source, find_tied

KIND = "mapping of arrays"


def read(tree: PyTree) -> Source:
    where = f"the {type(tree).__name__} that was given"
    try:
        leaves, others = flatten_containers(tree, _is_array, _children)
    except InvalidArgumentTypeError:
        raise  # a TypeError, and by its base a ValueError
    except ValueError as error:
        raise WeightsFileError(
            "The arrays of the mapping have ambiguous names.",
            where=where,
            got=error,
            write="a mapping with one name for each array",
        ) from error
    if not leaves and not isinstance(tree, Mapping):
        raise _no_arrays(where, f"{type(tree).__name__}: {tree!r}"[:200])
    _require_numbers(leaves, where)
    entries = {name: _make_entry(name, leaf, where) for name, leaf in leaves.items()}
    tied = find_tied({name: id(leaf) for name, leaf in leaves.items()})
    return Source("mapping", where, entries, metadata=others, tied=tied)


def _children(tree: PyTree) -> Iterable[tuple[Any, Any]] | None:
    found = children_of(tree)
    if found is not None or tree is None or isinstance(tree, (str, bytes, numbers.Number)):
        return found
    if jax.tree_util.all_leaves([tree]):
        raise _no_arrays("what was given", f"{type(tree).__name__}: {tree!r}"[:200])
    return leaves_by_name(tree).items()


def _no_arrays(where: str, got: str) -> InvalidArgumentTypeError:
    return InvalidArgumentTypeError(
        "Expected the path of a file, or a mapping of names to arrays.",
        where=where,
        got=got,
        write="open_source(path), or a dict of arrays",
    )


def _is_array(value: ArrayLike) -> bool:
    return (
        isinstance(value, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct))
        or is_tracer(value)
        or _is_of_torch(value)
    )


def _is_of_torch(value: PyTree) -> bool:
    torch = sys.modules.get("torch")  # whoever has such an array has imported torch
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _make_entry(name: str, leaf: PyTree, where: str) -> Entry:
    if isinstance(leaf, jax.ShapeDtypeStruct) or is_tracer(leaf):
        raise InvalidArgumentTypeError(
            "A source requires arrays with values.",
            where=f"{name} in {where}",
            got=type(leaf).__name__,
            write="arrays, outside of jit; a module that was initialised",
        )
    if _is_of_torch(leaf):
        leaf = _from_torch(leaf)
    if is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    return Entry(
        f"{name} in {where}", KIND, leaf.shape, np.dtype(leaf.dtype),
        lambda: np.asarray(leaf), lambda index: np.asarray(leaf[index]),
    )  # fmt: skip


def _require_numbers(leaves: Mapping[str, Any], where: str) -> None:
    none = [
        f"{name}: an array of {leaf.dtype}"
        for name, leaf in leaves.items()
        if isinstance(leaf.dtype, np.dtype) and (leaf.dtype.hasobject or leaf.dtype.kind in "SUMm")
    ]
    if none:
        raise InvalidArgumentTypeError(
            "A source requires numeric arrays.",
            where=where,
            got=a_few(none, 20),
            write="arrays of numbers or booleans",
        )


def _from_torch(tensor: PyTree) -> np.ndarray:
    """An array of torch as numpy's; numpy and it share no dtype for bfloat16."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(sys.modules["torch"].int16).numpy().view(np.dtype("bfloat16"))
    return tensor.numpy()


# --- nested containers of arrays, with dotted names and limits of depth and size ------


_DEEPEST = 200
_MOST = 1_000_000


def flatten_containers(
    tree: PyTree,
    is_leaf: Callable[[PyTree], bool],
    parts: Callable[[PyTree], Iterable[tuple[Any, Any]] | None] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the leaves by dotted name, and the strings and numbers by dotted name.

    Example:
        >>> flatten_containers({"a": [1.5j, "text"], "b": {}}, lambda x: isinstance(x, complex))
        ({'a.0': 1.5j}, {'a.1': 'text'})
    """
    parts = parts or children_of
    leaves: dict[str, Any] = {}
    others: dict[str, Any] = {}
    left = _MOST
    waiting: list[tuple[str, Any, int]] = [("", tree, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        left -= 1
        if depth > _DEEPEST or left < 0:
            raise ValueError(f"containers in containers without end, at {name[:200]!r}")
        if is_leaf(value):
            if name in leaves:
                raise ValueError(f"two arrays with the name {name!r}")
            leaves[name] = value
        elif (children := parts(value)) is not None:
            below = [(join_path(name, str(key)), child, depth + 1) for key, child in children]
            if len(below) + len(waiting) > _MOST:
                raise ValueError(f"containers in containers without end, at {name[:200]!r}")
            waiting.extend(reversed(below))
        elif isinstance(value, (str, bytes, numbers.Number)):
            others[name] = value
    return leaves, others


def children_of(value: PyTree) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return None
