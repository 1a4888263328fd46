"""Conversion of modules to nested dicts of arrays, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from pax_export._foundations.errors import (
    InvalidArgumentTypeError,
    MissingWeightError,
    StructureMismatchError,
)
from pax_export._foundations.types import Array, ArrayLike, PyTree
from pax_export.core._check import describe_array
from pax_export.core._containers import is_dict
from pax_export.core._pure import require_module
from pax_export.core._static import StaticLeaf
from pax_export.core._traversal import join_path, map_attributes, one_level, path_name
from pax_export.core._tree import EmptyNode, Node, flatten, is_array

M = TypeVar("M", bound=Node)
T = TypeVar("T")


def state_dict(module: Node) -> dict[str, Any]:
    """Saves all arrays of a module, parameters and states alike, to a dict.

    Args:
        module: the module.

    Returns:
        Attribute name -> value.  A submodule is again such a dict; lists,
        tuples and dicts stay; arrays are the module's own, not copies; a value that is
        not an array in a mixed container is None.

    Raises:
        InvalidArgumentTypeError: ``module`` is not a module.

    Example:
        >>> import jax, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(1, 2), jax.nn.relu)
        >>> weights = pax.experimental.save_weights_to_dict(net)
        >>> jax.tree_util.tree_map(lambda x: x.shape, weights)
        {'modules': ({'bias': (2,), 'weight': (1, 2)}, {})}
    """
    require_module(module, "save_weights_to_dict")
    return _to_dict(module)


def _is_dict_leaf(value: object) -> bool:
    return isinstance(value, (Node, EmptyNode, StaticLeaf)) or value is None


def _to_dict(value: Node | StaticLeaf | ArrayLike) -> Any:
    if not isinstance(value, Node):
        return None if isinstance(value, StaticLeaf) else value
    children, moduledef = flatten(value)
    values = [jax.tree_util.tree_map(_to_dict, child, is_leaf=_is_dict_leaf) for child in children]
    return dict(zip(moduledef.names, values))


def load_state_dict(module: M, weights: dict[str, Any]) -> M:
    """Makes a module with the arrays of a dict that `state_dict` made.

    Args:
        module: the module to start from; it does not change.
        weights: the dict.  Every array of the module must be in it, with the
            same shape and dtype; None keeps the module's own.

    Returns:
        The new module, in the mode (train or eval) of ``module``.

    Raises:
        MissingWeightError: (a KeyError) an array of the module is missing.
        StructureMismatchError: (a ValueError) a container, a shape or a dtype
            differs, or the dict has names that the module lacks.

    Example:
        >>> import pax_export as pax
        >>> a, b = pax.Linear(2, 3), pax.Linear(2, 3)
        >>> b = pax.experimental.load_weights_from_dict(b, a.state_dict())
        >>> a == b
        True
    """
    require_module(module, "load_weights_from_dict")
    return _from_dict(module, weights, "")


def _from_dict(module: M, weights: dict[str, Any], path: str) -> M:
    names = flatten(module)[1].names
    if not is_dict(weights):
        raise StructureMismatchError(
            "The weights of a module must be a dict of its attributes.",
            where=path or "(the root)",
            got=type(weights).__name__,
            write="a dict as module.state_dict() makes it",
        )
    _require_names(names, weights, path)
    return map_attributes(
        module,
        lambda name, child: _load_subtree(child, weights[name], join_path(path, name)),
    )


def _require_names(names: tuple[str, ...], weights: dict[Any, Any], path: str) -> None:
    missing = [join_path(path, name) for name in names if name not in weights]
    if missing:
        raise MissingWeightError(
            "The weights lack attributes that the module has.",
            where=", ".join(missing),
            got=f"the names {', '.join(map(str, weights)) or '(none)'}",
            write="dicts in dicts as module.state_dict() makes them, or None at a name to keep the "
            "module's own; pax_export.weights.adopt(module, weights) for dotted names",
        )
    unknown = [join_path(path, str(name)) for name in weights if name not in names]
    if unknown:
        raise StructureMismatchError(
            "The weights have names that the module lacks.",
            where=", ".join(unknown),
            got=f"a module with {', '.join(names) or 'no arrays'}",
            write="weights without these names, or a module that has them",
        )


def _load_subtree(own: PyTree, values: PyTree, path: str) -> Any:
    """Takes over one subtree of an attribute: a leaf, a module or a container."""
    if values is None or isinstance(own, StaticLeaf) or own is None:
        return own
    if isinstance(own, Node):
        return _from_dict(own, values, path)
    if isinstance(own, EmptyNode) or isinstance(values, EmptyNode):
        return values if isinstance(own, EmptyNode) else own
    if jax.tree_util.all_leaves([own]):
        return _check_array(own, values, path)
    return _load_container(own, values, path)


def _load_container(own: T, loaded: PyTree, path: str) -> T:
    items, treedef = one_level(own)
    others, other_def = one_level(loaded)
    # Only the keys matter: non-arrays in a mixed container are None here.
    if type(own) is not type(loaded) or [k for k, _ in items] != [k for k, _ in others]:
        raise StructureMismatchError(
            "A container of the weights differs from that of the module.",
            where=path,
            got=f"{other_def} where the module has {treedef}",
            write="weights of the same kind of module",
        )
    values = [
        _load_subtree(x, y, join_path(path, path_name(key)))
        for (key, x), (_, y) in zip(items, others)
    ]
    return jax.tree_util.tree_unflatten(treedef, values)


def _check_array(own: Array, values: Array, path: str) -> Array:
    """An array of the weights, if it fits the place."""
    if not is_array(values):
        raise InvalidArgumentTypeError(
            "The weights contain a leaf that is not an array.",
            where=path,
            got=f"{type(values).__name__}: {values!r}"[:120],
            write=f"an array {describe_array(own)}, e.g. jnp.asarray(...)",
        )
    if is_array(own) and (own.shape != values.shape or own.dtype != values.dtype):
        raise StructureMismatchError(
            "An array of the weights does not fit the module.",
            where=path,
            got=describe_array(values),
            write=f"an array {describe_array(own)}",
        )
    return values
