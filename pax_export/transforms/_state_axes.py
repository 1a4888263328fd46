"""Axes: for each leaf of a tree, the axis along which a transform maps it, or None."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import tree_leaves

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export.core import EmptyNode, is_node, one_level, path_name, static_key
from pax_export.transforms._filters import as_filter
from pax_export.transforms._lift import parts_of

Axes = list[int | None]


class StateAxes(Mapping):
    """Says for the leaves of a module along which axis they are mapped.

    Args:
        axes: an ordered mapping from filters to axes; the first filter that
            selects a leaf counts.  None, and no filter at all, mean that the
            leaf is not mapped: all calls share it.

    Raises:
        InvalidArgumentTypeError: (a TypeError) a key is no filter, or a value
            no axis.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> axes = T.StateAxes({"bias": None, T.Param: 0})
        >>> layers = pax.Linear(2, 3).replace(weight=jnp.ones((5, 2, 3)))
        >>> T.vmap(lambda net, x: net(x), in_axes=(axes, None))(layers, jnp.ones((1, 2))).shape
        (5, 1, 3)
    """

    def __init__(self, axes: Mapping[Any, int | None]):
        if not isinstance(axes, Mapping):
            raise InvalidArgumentTypeError(
                "Axes of a state are a mapping from filters to axes.",
                got=f"{type(axes).__name__}: {axes!r}"[:120],
                write="{Param: 0}",
            )
        self._pairs = tuple([(key, _axis(axis)) for key, axis in axes.items()])
        self._key = static_key(self._pairs)  # predicates count by their code
        self._rules = tuple([(as_filter(key), axis) for key, axis in self._pairs])

    def __getitem__(self, key: Any) -> int | None:
        for own, axis in self._pairs:
            if own is key or own == key:
                return axis
        raise KeyError(key)

    def __iter__(self) -> Any:
        return iter([key for key, _ in self._pairs])

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateAxes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"StateAxes({dict(self._pairs)!r})"

    def __reduce__(self) -> Any:
        return StateAxes, (dict(self._pairs),)

    def of(self, module: Any) -> Axes:
        """The axis of each leaf of a module."""
        axes: Axes = [None] * len(tree_leaves(module))
        found = [False] * len(axes)
        for select, axis in self._rules:
            for i, chosen in enumerate(select(module)):
                if chosen and not found[i]:
                    found[i], axes[i] = True, axis
        return axes


def _axis(value: Any) -> int | None:
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentTypeError(
            "An axis is an integer, or None for what is not mapped.",
            got=f"{type(value).__name__}: {value!r}"[:120],
            write="0",
        ) from None


def as_state_axes(value: Any) -> StateAxes | None:
    """What a user gave as ``state_axes``."""
    return value if value is None or isinstance(value, StateAxes) else StateAxes(value)


def is_axis(prefix: Any) -> bool:
    """True for what stands for a whole subtree: an axis, None or a `StateAxes`."""
    if prefix is None or isinstance(prefix, StateAxes):
        return True
    return isinstance(prefix, int) and not isinstance(prefix, bool)


def axes_of(prefix: Any, tree: Any, state_axes: StateAxes | None, where: str) -> Axes:
    """The axis of each leaf of a tree.

    Args:
        prefix: a tree of axes with the structure of a part of ``tree``'s top.
        tree: modules and arrays.
        state_axes: what governs the leaves of modules, if given.
        where: the argument, for messages: ``in_axes[1]``.

    Raises:
        InvalidArgumentError: the prefix is no prefix of the tree.
    """
    if is_node(tree) and state_axes is not None and not isinstance(prefix, StateAxes):
        return state_axes.of(tree)
    if is_axis(prefix):
        return [axis for part in parts_of(tree) for axis in _of_part(prefix, part, state_axes)]
    if isinstance(prefix, EmptyNode) or jax.tree_util.all_leaves([prefix]):
        raise _no_prefix(prefix, tree, where)
    items, level = one_level(prefix)
    if isinstance(prefix, list) and isinstance(tree, tuple):
        items, level = one_level(tuple(prefix))
    below, level_of_tree = one_level(tree)
    if level != level_of_tree:
        raise _no_prefix(prefix, tree, where)
    axes: Axes = []
    for (path, entry), (_, value) in zip(items, below):
        axes += axes_of(entry, value, state_axes, f"{where}.{path_name(path)}")
    return axes


def _of_part(prefix: Any, part: Any, state_axes: StateAxes | None) -> Axes:
    if not part.is_module:
        return [None if isinstance(prefix, StateAxes) else prefix]
    governing = prefix if isinstance(prefix, StateAxes) else state_axes
    return [prefix] * (part.stop - part.start) if governing is None else governing.of(part.value)


def _no_prefix(prefix: Any, tree: Any, where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "Axes must be an integer, None, StateAxes, or a tree of these that follows the argument.",
        where=where,
        got=f"{prefix!r} for {type(tree).__name__}"[:200],
        write="one axis for the whole argument, or one for each of its parts",
    )
