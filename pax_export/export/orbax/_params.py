"""The params of a `JaxModule`: arrays are variables named by path, other leaves are unchanged."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, StructureMismatchError, UnsupportedDtypeError
from pax_export._types import PyTree
from pax_export.export.lowering.variables import Store
from pax_export.export.orbax import dtensor_utils
from pax_export.export.orbax._shapes import broadcast_prefix
from pax_export.export.orbax._tensorflow import tf
from pax_export.export.tracing.exportable import ExportLeaf, leaf_struct
from pax_export.export.tracing.spec import distinct_names

_KEYS = {
    jax.tree_util.SequenceKey: "idx",
    jax.tree_util.DictKey: "key",
    jax.tree_util.GetAttrKey: "name",
    jax.tree_util.FlattenedIndexKey: "key",
}
# Characters that TensorFlow allows in variable names; haiku's names contain slashes.
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\\/>-]")
_NUMBERS = (bool, int, float, complex)
_ARRAYS = (
    *(jax.Array, np.ndarray, np.generic, *_NUMBERS),
    jax.ShapeDtypeStruct,  # to be refused by name
)


def get_key_name(key: object) -> int | str:
    """Returns the name of one step of a jax key path.

    Args:
        key: a `SequenceKey`, `DictKey`, `GetAttrKey` or `FlattenedIndexKey`.

    Raises:
        InvalidArgumentError: another type.

    Example:
        >>> get_key_name(jax.tree_util.DictKey("kernel"))
        'kernel'
    """
    for kind, attribute in _KEYS.items():
        if isinstance(key, kind):
            name = getattr(key, attribute)
            return str(name) if kind is jax.tree_util.DictKey else name
    raise InvalidArgumentError(f'Unsupported KeyEntry: {type(key)}: "{key}"')


def get_param_names(params: PyTree) -> Any:
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
    names = jax.tree_util.tree_unflatten(tree, [_join_path(path) for path, _ in paths])
    if jax.tree_util.tree_structure(names) == tree:
        return names
    logging.getLogger(__name__).warning(
        "A node of the params does not take names for arrays; its variables are called "
        "jax_param_<index>: %s",
        tree,
    )
    return jax.tree_util.tree_unflatten(tree, [f"jax_param_{i}" for i in range(len(paths))])


def _join_path(path: tuple) -> str:
    def name(entry: object) -> str:
        if isinstance(entry, tuple(_KEYS)):
            return str(get_key_name(entry))
        return jax.tree_util.keystr((entry,), simple=True)  # of a node with its own key class

    return ".".join(map(name, path)).replace("~", "_")


class Model:
    """The params, the variables of their leaves, and those of closed-over arrays."""

    def __init__(self, params: PyTree, trainable: object, pspecs: object, consolidate: bool):
        self._placement = _Placement(pspecs, consolidate)
        paths, self.tree = jax.tree_util.tree_flatten_with_path(params)
        flags = [bool(flag) for flag in broadcast_prefix(trainable, params, "trainable")]
        kind = jax.sharding.PartitionSpec
        specs = broadcast_prefix(pspecs, params, "pspecs", lambda value: isinstance(value, kind))
        self._places = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, _ARRAYS)]
        self._others = {i: x for i, (_, x) in enumerate(paths) if not isinstance(x, _ARRAYS)}
        self._specs = [specs[place] for place in self._places]
        self._flags = [flags[place] for place in self._places]
        legal = (_ILLEGAL.sub("_", _join_path(paths[place][0])) for place in self._places)
        names = distinct_names(name.lstrip("_/\\>-") or "params" for name in legal)
        taken: dict[int, tuple] = {}
        leaves, arrays = [], []
        for name, place in zip(names, self._places):
            path, given = paths[place]
            value = _to_array(given, name)
            own = (flags[place], specs[place])
            if taken.setdefault(id(value), (value, own))[1] != own:
                value = value.copy()  # one array that is a leaf of two kinds
            # A Python number takes part in arithmetic as one.
            struct = leaf_struct(given if isinstance(given, _NUMBERS) else value, name)
            # Integers have no gradient; their variables are marked as requested.
            trains = flags[place] and bool(jax.numpy.issubdtype(struct.dtype, jax.numpy.inexact))
            leaves.append(ExportLeaf(name, jax.tree_util.keystr(path), None, struct, trains))
            arrays.append(value)
        self.leaves = tuple(leaves)
        self.lay_out(params, arrays)

    def lay_out(self, params: PyTree, arrays: Sequence[Any]) -> None:
        """Makes the variables of params with these arrays; leaves that are one array share one."""
        leaves = [dataclasses.replace(leaf, value=x) for leaf, x in zip(self.leaves, arrays)]
        store = Store(leaves, (), trainable=True)
        first: dict[int, int] = {}  # the first leaf of each variable, in their order
        for index, place in enumerate(store.of_leaf):
            first.setdefault(place, index)
        make = self._placement.variable
        variables = [
            make(each.value, self.leaves[index].name, self._flags[index], self._specs[index])
            for each, index in zip(store.variables, first.values())
        ]
        self.params, self.store, self.variables = params, store, variables

    def leaf_variables(self) -> list[Any]:
        """The variable of each leaf that is an array, in their order."""
        return [self.variables[place] for place in self.store.of_leaf]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The params, with other values for arrays."""
        leaves = {**self._others, **dict(zip(self._places, arrays))}
        return jax.tree_util.tree_unflatten(self.tree, [leaves[i] for i in range(len(leaves))])

    def add_variables(self) -> list[Any]:
        """Creates variables for the arrays in closures of methods, once these are traced."""
        new = self.store.variables[len(self.variables) :]
        made = [self._placement.variable(each.value, each.name, False, None) for each in new]
        self.variables.extend(made)
        return made

    def check(self, params: PyTree) -> list[Any]:
        """The arrays of other params; an error if the variables cannot take them."""
        leaves, tree = jax.tree_util.tree_flatten(params)
        if tree != self.tree:
            raise StructureMismatchError(
                "The PyTree structure of the updated parameters must be the same as that of the "
                f"original parameters. Got new treedef: {tree}, original treedef: {self.tree}"
            )
        for place, old in self._others.items():
            if leaves[place] is not old and not _is_equal(leaves[place], old):
                raise InvalidArgumentError(
                    "A leaf that is not an array differs; it is part of the exported functions.",
                    got=f"{leaves[place]!r} instead of {old!r}",
                    write="a new JaxModule",
                )
        return [_fitting(leaves[place], leaf) for place, leaf in zip(self._places, self.leaves)]

    def ties_hold(self, arrays: Iterable[Any]) -> bool:
        """Whether leaves that are one variable are still equal."""
        first: dict[int, Any] = {}
        return all(
            value is first.setdefault(place, value) or _same_bytes(value, first[place])
            for place, value in zip(self.store.of_leaf, arrays)
        )

    def assign(self, params: PyTree, arrays: Sequence[Any]) -> None:
        """Gives the variables the checked arrays of other params, one by one; all or none."""
        old: dict[int, tuple[Any, Any]] = {}
        try:
            for place, value, spec in zip(self.store.of_leaf, arrays, self._specs):
                if place not in old:
                    old[place] = (self.store.variables[place].value, spec)
                    self._assign_variable(place, value, spec)
        except BaseException:
            for place, (value, spec) in old.items():
                self._assign_variable(place, value, spec)
            raise
        self.params = params

    def _assign_variable(self, place: int, value: object, spec: object) -> None:
        self.store.replace(place, value)
        stored = self._placement.stored(self.store.variables[place].value, spec)
        self.variables[place].assign(stored)


class _Placement:
    """The placement of variables: on the host, or sharded over a DTensor mesh."""

    def __init__(self, pspecs: object, consolidate: bool):
        self._mesh = dtensor_utils.get_current_mesh()
        self._consolidate = consolidate
        if self._mesh is not None and pspecs is None:
            raise InvalidArgumentError(
                "DTensor export is enabled but `pspecs` is not specified in JaxModule.",
                write="pspecs=get_pspec_from_jax_arrays(params)",
            )
        if self._mesh is None and pspecs is not None:
            raise InvalidArgumentError(
                "`pspecs` is not None but JaxModule is not created within a DTensor export "
                "context.",
                write="initialize_dtensor(), then the JaxModule within "
                "`with maybe_enable_dtensor_export_on(mesh):`",
            )

    def variable(self, value: object, name: str, trainable: bool, pspec: object) -> Any:
        """Creates a variable with the value."""
        if self._mesh is not None:
            tensor = self.stored(value, pspec)
            return tf.experimental.dtensor.DVariable(tensor, trainable=trainable, name=name)
        # The host, where no training needs the memory.
        with tf.device(tf.config.list_logical_devices("CPU")[0].name):
            return tf.Variable(value, trainable=trainable, name=name)

    def stored(self, value: PyTree, pspec: PyTree) -> Any:
        """Returns the value to assign to a variable with this partition spec."""
        if self._mesh is None:
            return value
        return dtensor_utils.jax_array_to_dtensor(
            value, pspec, self._mesh.dtensor_mesh, self._mesh.jax_mesh, self._consolidate
        )


def _to_array(value: PyTree, name: str) -> Any:
    """A leaf as an array of a dtype that jax has."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UnsupportedDtypeError(
            "The params are descriptions of arrays, and a SavedModel holds the arrays.",
            where=name,
            got=str(value),
            write="the arrays themselves",
        )
    if isinstance(value, _NUMBERS):
        return np.asarray(value, jax.numpy.result_type(value))
    dtype = np.dtype(value.dtype) if isinstance(value, (np.ndarray, np.generic)) else None
    if dtype is None or dtype.kind not in "iufc":
        return value
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if narrow == dtype:
        return value
    with np.errstate(over="ignore"):
        result = value.astype(narrow)
    lost = result != value if dtype.kind in "iu" else np.isfinite(value) & ~np.isfinite(result)
    if np.any(lost):
        raise UnsupportedDtypeError(
            f"jax narrows this array to {narrow} while 64-bit numbers are off, and it holds "
            "numbers that do not fit.",
            where=name,
            got=dtype.name,
            write='jax.config.update("jax_enable_x64", True)',
        )
    return result


def _fitting(value: PyTree, leaf: ExportLeaf) -> Any:
    if not isinstance(value, _ARRAYS):
        raise InvalidArgumentError(
            "Incompatible type conversion: a parameter is not an array.",
            where=leaf.name,
            got=type(value).__name__,
        )
    if getattr(value, "is_deleted", lambda: False)():
        raise InvalidArgumentError(
            "An array has been deleted (donated to a jitted function).", where=leaf.name
        )
    value = _to_array(value, leaf.name)
    if tuple(value.shape) != tuple(leaf.struct.shape):
        raise InvalidArgumentError(
            f"Shape mismatch. The variable has the shape {tuple(leaf.struct.shape)}, and the "
            f"new value the shape {tuple(value.shape)}.",
            where=leaf.name,
            write="params with the shapes of the original ones",
        )
    if value.dtype != leaf.struct.dtype:
        raise InvalidArgumentError(
            f"Incompatible type conversion: a variable of type {leaf.struct.dtype} cannot take "
            f"a value of type {value.dtype}.",
            where=leaf.name,
            write=f"value.astype({str(leaf.struct.dtype)!r})",
        )
    return value


def _same_bytes(one: PyTree, other: PyTree) -> bool:
    if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _is_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False
