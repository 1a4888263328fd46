"""What the variables of a pytree of params are called: ``layers.0.kernel``."""

from __future__ import annotations

import logging
import re
from typing import Any

import jax

from pax_export._errors import InvalidArgumentError

_KEYS = {
    jax.tree_util.SequenceKey: "idx",
    jax.tree_util.DictKey: "key",
    jax.tree_util.GetAttrKey: "name",
    jax.tree_util.FlattenedIndexKey: "key",
}
# Of a variable's name, TensorFlow allows these; haiku's names hold slashes.
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\\/>-]")


def get_key_name(key: Any) -> int | str:
    """What one step of a jax key path is called.

    Args:
        key: a `SequenceKey`, `DictKey`, `GetAttrKey` or `FlattenedIndexKey`.

    Raises:
        InvalidArgumentError: it is something else.

    Example:
        >>> get_key_name(jax.tree_util.DictKey("kernel"))
        'kernel'
    """
    for kind, attribute in _KEYS.items():
        if isinstance(key, kind):
            name = getattr(key, attribute)
            return str(name) if kind is jax.tree_util.DictKey else name
    raise InvalidArgumentError(f'Unsupported KeyEntry: {type(key)}: "{key}"')


def get_param_names(params: Any) -> Any:
    """The name of every leaf, in a pytree like the params.

    Args:
        params: any pytree.

    Returns:
        The same pytree with names for leaves; `~` is written `_`, as haiku's
        names need it.

    Example:
        >>> get_param_names({"mlp/~/linear": {"w": 1.0}, "scales": [2.0, 3.0]})
        {'mlp/~/linear': {'w': 'mlp/_/linear.w'}, 'scales': ['scales.0', 'scales.1']}
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    names = jax.tree_util.tree_unflatten(tree, [_joined(path) for path, _ in paths])
    if jax.tree_util.tree_structure(names) == tree:
        return names
    logging.getLogger(__name__).warning(
        "A node of the params does not take names for arrays; its variables are called "
        "jax_param_<index>: %s",
        tree,
    )
    return jax.tree_util.tree_unflatten(tree, [f"jax_param_{i}" for i in range(len(paths))])


def variable_names(paths: list[tuple]) -> list[str]:
    """Legal and different names for leaves with these key paths."""
    names = []
    for path in paths:
        name = _ILLEGAL.sub("_", _joined(path)).lstrip("_/\\>-") or "params"
        names.append(name)
    taken: set[str] = set()
    for index, name in enumerate(names):
        candidate, number = name, 0
        while candidate in taken:
            number += 1
            candidate = f"{name}-{number}"
        taken.add(candidate)
        names[index] = candidate
    return names


def _joined(path: tuple) -> str:
    return ".".join(str(_key(entry)) for entry in path).replace("~", "_")


def _key(entry: Any) -> int | str:
    if isinstance(entry, tuple(_KEYS)):
        return get_key_name(entry)
    return jax.tree_util.keystr((entry,), simple=True)  # of a node with keys of its own
