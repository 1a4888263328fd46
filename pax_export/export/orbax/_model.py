"""The params of a `JaxModule`: what they are in jax, and the variables that hold them.

The arrays among the leaves become variables, arrays that are one array one
variable.  Other leaves (a function in an equinox module) stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pax_export._errors import (
    InvalidArgumentError,
    StructureMismatchError,
    UnsupportedDtypeError,
)
from pax_export.export.lowering.variables import Store
from pax_export.export.orbax import _names, _shapes
from pax_export.export.orbax._variables import Placement
from pax_export.export.tracing.exportable import Leaf, leaf_struct


class Model:
    """The params, the variables of their leaves, and those of closed-over arrays."""

    def __init__(self, params: Any, trainable: Any, pspecs: Any, placement: Placement):
        self.params = params
        self._placement = placement
        paths, self.tree = jax.tree_util.tree_flatten_with_path(params)
        flags = _flags(trainable, params)
        specs = [None] * len(flags) if pspecs is None else _specs(pspecs, params)
        self._places = [i for i, (_, leaf) in enumerate(paths) if is_array(leaf)]
        self._others = {i: leaf for i, (_, leaf) in enumerate(paths) if not is_array(leaf)}
        names = _names.variable_names([paths[place][0] for place in self._places])
        self._specs = [specs[place] for place in self._places]
        taken: dict[int, tuple] = {}
        leaves = []
        for name, place, spec in zip(names, self._places, self._specs):
            path, value = paths[place]
            value = _tie(_array(value, name), (flags[place], spec), taken)
            struct = leaf_struct(value, name)
            # A Python number takes part in arithmetic as one.
            weak = struct.weak_type or isinstance(paths[place][1], (bool, int, float, complex))
            struct = jax.ShapeDtypeStruct(struct.shape, struct.dtype, weak_type=weak)
            leaves.append(
                Leaf(name, jax.tree_util.keystr(path), value, struct, _trains(flags[place], struct))
            )
        self.leaves = tuple(leaves)
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes the variables; leaves that are one array share one."""
        self.store = Store(self.leaves, (), trainable=True)
        first = {place: index for index, place in reversed(list(enumerate(self.store.of_leaf)))}
        self.variables = [
            self._placement.variable(
                variable.value,
                self.leaves[first[place]].name,
                variable.trainable,
                self._specs[first[place]],
            )
            for place, variable in enumerate(self.store.variables)
        ]
        self.leaves = tuple(dataclasses.replace(leaf, value=None) for leaf in self.leaves)

    def leaf_variables(self) -> list[Any]:
        """The variable of each leaf that is an array, in their order."""
        return [self.variables[place] for place in self.store.of_leaf]

    def variable_tree(self) -> Any:
        """The params, with variables for arrays."""
        return self.rebuild(self.leaf_variables())

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The params, with other values for arrays."""
        leaves = dict(self._others)
        leaves.update(zip(self._places, arrays))
        return jax.tree_util.tree_unflatten(self.tree, [leaves[i] for i in range(len(leaves))])

    def add_variables(self) -> list[Any]:
        """Makes variables for the arrays that methods close over, once they are known."""
        new = self.store.variables[len(self.variables) :]
        made = [self._placement.variable(each.value, each.name, False, None) for each in new]
        self.variables.extend(made)
        return made

    def check(self, params: Any) -> list[Any]:
        """The arrays of other params, if the variables can take them.

        Raises:
            StructureMismatchError: they have another structure.
            InvalidArgumentError: an array has another shape or dtype.
        """
        leaves, tree = jax.tree_util.tree_flatten(params)
        if tree != self.tree:
            raise StructureMismatchError(
                "The PyTree structure of the updated parameters must be the same as that of the "
                f"original parameters. Got new treedef: {tree}, original treedef: {self.tree}"
            )
        for place, old in self._others.items():
            if leaves[place] is not old and not _equal(leaves[place], old):
                raise InvalidArgumentError(
                    "A leaf that is no array differs; it is part of the exported functions.",
                    got=f"{leaves[place]!r} instead of {old!r}",
                    write="a new JaxModule",
                )
        arrays = [leaves[place] for place in self._places]
        return [_fitting(value, leaf) for value, leaf in zip(arrays, self.leaves)]

    def ties_hold(self, arrays: Iterable[Any]) -> bool:
        """Whether leaves that are one variable are still equal."""
        first: dict[int, Any] = {}
        return all(
            value is first.setdefault(place, value) or _same(value, first[place])
            for place, value in zip(self.store.of_leaf, arrays)
        )

    def untie(self, params: Any, arrays: Sequence[Any]) -> None:
        """Takes other params, with a variable for each leaf: arrays that were one differ."""
        before = (self.params, self.leaves, self.store, self.variables)
        try:
            self.leaves = tuple(
                dataclasses.replace(leaf, value=value) for leaf, value in zip(self.leaves, arrays)
            )
            self._lay_out()
            self.params = params
        except BaseException:
            self.params, self.leaves, self.store, self.variables = before
            raise

    def assign(self, params: Any, arrays: Sequence[Any]) -> None:
        """Gives the variables other values, one after the other; all of them or none.

        Args:
            params: of which these arrays are the leaves.
            arrays: the new values, that have been checked.
        """
        stored = self._placement.stored
        old: list[tuple[int, Any]] = []
        seen = set()
        try:
            for place, value, spec in zip(self.store.of_leaf, arrays, self._specs):
                if place in seen:
                    continue
                seen.add(place)
                old.append((place, self.store.variables[place].value))
                self.store.replace(place, value)
                self.variables[place].assign(stored(self.store.variables[place].value, spec))
        except BaseException:
            for place, value in old:
                self.store.replace(place, value)
                index = self.store.of_leaf.index(place)
                self.variables[place].assign(stored(value, self._specs[index]))
            raise
        self.params = params


_ARRAYS = (
    *(jax.Array, np.ndarray, np.generic, bool, int, float, complex),
    jax.ShapeDtypeStruct,  # to be refused by name
)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of params becomes a variable."""
    return isinstance(leaf, _ARRAYS)


def _flags(trainable: Any, params: Any) -> list[bool]:
    values = _shapes.broadcast(trainable, params, "trainable")
    return [bool(value) for value in values]


def _specs(pspecs: Any, params: Any) -> list[Any]:
    spec = jax.sharding.PartitionSpec
    return _shapes.broadcast(pspecs, params, "pspecs", lambda value: isinstance(value, spec))


def _trains(flag: bool, struct: jax.ShapeDtypeStruct) -> bool:
    return flag and bool(jax.numpy.issubdtype(struct.dtype, jax.numpy.inexact))


def _tie(value: Any, kind: tuple, taken: dict[int, tuple]) -> Any:
    """The value, or a copy of it where it stands for leaves of two kinds."""
    known = taken.setdefault(id(value), (value, kind))
    return value if known[1] == kind else value.copy()


def _array(value: Any, name: str) -> Any:
    """A leaf as an array of a dtype that jax has."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise UnsupportedDtypeError(
            "The params are descriptions of arrays, and a SavedModel holds the arrays.",
            where=name,
            got=str(value),
            write="the arrays themselves",
        )
    if isinstance(value, (bool, int, float, complex)):
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


def _fitting(value: Any, leaf: Leaf) -> Any:
    if not is_array(value):
        raise InvalidArgumentError(
            "Incompatible type conversion: a parameter is no array.",
            where=leaf.name,
            got=type(value).__name__,
        )
    if getattr(value, "is_deleted", lambda: False)():
        raise InvalidArgumentError(
            "An array has been deleted (donated to a jitted function).", where=leaf.name
        )
    value = _array(value, leaf.name)
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


def _same(one: Any, other: Any) -> bool:
    keys = jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key)
    if keys:
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False
