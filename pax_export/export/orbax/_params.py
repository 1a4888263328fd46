"""The params of a `JaxModule`: arrays are variables named by path, other leaves are unchanged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax.sharding import PartitionSpec

from pax_export._foundations.errors import (
    InvalidArgumentError,
    StructureMismatchError,
    UnsupportedDtypeError,
    first_line,
)
from pax_export._foundations.types import Array, ArrayLike, PyTree, Size
from pax_export.export.artifact import dimensions
from pax_export.export.lowering.variables import Store
from pax_export.export.orbax import dtensor_utils
from pax_export.export.orbax.dtensor_utils import tf
from pax_export.export.tracing.exportable import ExportLeaf, leaf_struct
from pax_export.export.tracing.names import distinct_names

# Characters that TensorFlow allows in variable names; haiku's names contain slashes.
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.\\/>-]")
_NUMBERS = (bool, int, float, complex)
# Descriptions among them, which are refused by name.
_ARRAYS = (jax.Array, np.ndarray, np.generic, *_NUMBERS, jax.ShapeDtypeStruct)


def _join_path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").replace("~", "_")


def broadcast_prefix(
    prefix: PyTree, tree: PyTree, argument: str, is_leaf: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """One value of a prefix tree for each leaf; jax names the place where it does not fit."""

    def ends(value: object) -> bool:
        return value is None or is_leaf(value)

    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=ends), is_leaf=ends)
    except ValueError as error:
        error.add_note(f"The prefix is `{argument}`.")
        raise


class Model:
    """The params, the variables of their leaves, and those of closed-over arrays."""

    def __init__(self, params: PyTree, trainable: PyTree, pspecs: PyTree, consolidate: bool):
        self._placement = _Placement(pspecs, consolidate)
        paths, self.tree = jax.tree_util.tree_flatten_with_path(params)
        flags = [bool(flag) for flag in broadcast_prefix(trainable, params, "trainable")]
        is_spec = lambda value: isinstance(value, PartitionSpec)  # noqa: E731
        specs = broadcast_prefix(pspecs, params, "pspecs", is_spec)
        self._indices = [i for i, (_, leaf) in enumerate(paths) if isinstance(leaf, _ARRAYS)]
        self._others = {i: x for i, (_, x) in enumerate(paths) if not isinstance(x, _ARRAYS)}
        self._specs = [specs[index] for index in self._indices]
        self._flags = [flags[index] for index in self._indices]
        legal = (_ILLEGAL.sub("_", _join_path(paths[index][0])) for index in self._indices)
        names = distinct_names(name.lstrip("_/\\>-") or "params" for name in legal)
        owners: dict[int, tuple] = {}
        leaves, arrays = [], []
        for name, index in zip(names, self._indices):
            path, leaf_value = paths[index]
            value = _to_array(leaf_value, name)
            own = (flags[index], specs[index])
            if owners.setdefault(id(value), (value, own))[1] != own:
                value = value.copy()  # one array that is a leaf of two kinds
            # A Python number takes part in arithmetic as one.
            struct = leaf_struct(leaf_value if isinstance(leaf_value, _NUMBERS) else value, name)
            # Integers have no gradient; their variables are marked as requested.
            trains = flags[index] and bool(jax.numpy.issubdtype(struct.dtype, jax.numpy.inexact))
            leaves.append(ExportLeaf(name, jax.tree_util.keystr(path), None, struct, trains))
            arrays.append(value)
        self.leaves = tuple(leaves)
        self.lay_out(params, arrays)

    def lay_out(self, params: PyTree, arrays: Sequence[Any]) -> None:
        """Makes the variables of params with these arrays; leaves that are one array share one."""
        leaves = [dataclasses.replace(leaf, value=x) for leaf, x in zip(self.leaves, arrays)]
        store = Store(leaves, (), trainable=True)
        first: dict[int, int] = {}  # the first leaf of each variable, in their order
        for index, number in enumerate(store.of_leaf):
            first.setdefault(number, index)
        make = self._placement.variable
        variables = [
            make(each.value, self.leaves[index].name, self._flags[index], self._specs[index])
            for each, index in zip(store.variables, first.values())
        ]
        self.params, self.store, self.variables = params, store, variables

    def leaf_variables(self) -> list[Any]:
        """The variable of each leaf that is an array, in their order."""
        return [self.variables[number] for number in self.store.of_leaf]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The params, with other values for arrays."""
        leaves = {**self._others, **dict(zip(self._indices, arrays))}
        return jax.tree_util.tree_unflatten(self.tree, [leaves[i] for i in range(len(leaves))])

    def add_variables(self) -> list[Any]:
        """Creates variables for the arrays in closures of methods, once these are traced."""
        new = self.store.variables[len(self.variables) :]
        created = [self._placement.variable(each.value, each.name, False, None) for each in new]
        self.variables.extend(created)
        return created

    def check(self, params: PyTree) -> list[Any]:
        """The arrays of other params; an error if the variables cannot take them."""
        leaves, tree = jax.tree_util.tree_flatten(params)
        if tree != self.tree:
            raise StructureMismatchError(
                "The PyTree structure of the updated parameters must be the same as that of the "
                f"original parameters. Got new treedef: {tree}, original treedef: {self.tree}"
            )
        for index, old in self._others.items():
            if leaves[index] is not old and leaves[index] != old:
                raise InvalidArgumentError(
                    "A leaf that is not an array differs; it is part of the exported functions.",
                    got=f"{leaves[index]!r} instead of {old!r}",
                    write="a new JaxModule",
                )
        return [_fitting(leaves[index], leaf) for index, leaf in zip(self._indices, self.leaves)]

    def ties_hold(self, arrays: Iterable[Any]) -> bool:
        """Whether leaves that are one variable are still equal."""
        first: dict[int, Any] = {}
        return all(
            value is first.setdefault(number, value) or _same_bytes(value, first[number])
            for number, value in zip(self.store.of_leaf, arrays)
        )

    def assign(self, params: PyTree, arrays: Sequence[Any]) -> None:
        """Gives the variables the checked arrays of other params, one by one."""
        for number, value, spec in zip(self.store.of_leaf, arrays, self._specs):
            self.store.replace(number, value)
            stored = self._placement.stored(self.store.variables[number].value, spec)
            self.variables[number].assign(stored)
        self.params = params


class _Placement:
    """The placement of variables: on the host, or sharded over a DTensor mesh."""

    def __init__(self, pspecs: PyTree, consolidate: bool):
        self._mesh = dtensor_utils.get_current_mesh()
        self._consolidate = consolidate
        if (self._mesh is None) != (pspecs is None):
            raise InvalidArgumentError(
                "A JaxModule has `pspecs` within `maybe_enable_dtensor_export_on`, and only there.",
                got=f"pspecs={pspecs!r}, {'no' if self._mesh is None else 'a'} DTensor mesh",
                write="initialize_dtensor(), `with maybe_enable_dtensor_export_on(mesh):`, and "
                "pspecs=get_pspec_from_jax_arrays(params)",
            )

    def variable(
        self, value: Array, name: str, trainable: bool, pspec: PartitionSpec | None
    ) -> Any:
        """Creates a variable with the value."""
        if self._mesh is not None:
            tensor = self.stored(value, pspec)
            return tf.experimental.dtensor.DVariable(tensor, trainable=trainable, name=name)
        # The host, where no training needs the memory.
        with tf.device(tf.config.list_logical_devices("CPU")[0].name):
            return tf.Variable(value, trainable=trainable, name=name)

    def stored(self, value: Array, pspec: PartitionSpec | None) -> Any:
        """Returns the value to assign to a variable with this partition spec."""
        if self._mesh is None:
            return value
        return dtensor_utils.to_dtensor(value, pspec, self._mesh, self._consolidate)


def _to_array(value: ArrayLike | jax.ShapeDtypeStruct, name: str) -> Any:
    """A leaf as an array of a dtype that jax has."""
    if isinstance(value, _NUMBERS):
        return np.asarray(value, jax.numpy.result_type(value))
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "iufc":
        return value
    dtype = value.dtype
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


def _fitting(value: ArrayLike, leaf: ExportLeaf) -> Any:
    if isinstance(value, _ARRAYS):
        value = _to_array(value, leaf.name)
    if getattr(value, "dtype", None) != leaf.struct.dtype:
        what = f"Incompatible type conversion: the variable has the type {leaf.struct.dtype}."
    elif np.shape(value) != tuple(leaf.struct.shape):
        what = f"Shape mismatch. The variable has the shape {tuple(leaf.struct.shape)}."
    else:
        return value
    got = getattr(value, "dtype", type(value).__name__), getattr(value, "shape", ())
    raise InvalidArgumentError(what, where=leaf.name, got="{} {}".format(*got))


def _same_bytes(one: Array, other: Array) -> bool:
    if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- Converts partially known TensorFlow shapes to symbolic dimensions, and results back ---------


def symbolic_shape(
    name: str, shape: Sequence[int | None], spec: str | None, scope: jax_export.SymbolicScope
) -> tuple:
    """The shape of an input, with a symbolic dimension for each size that is not known."""
    names = iter("bcdefghij")
    example = ", ".join(next(names, "k") if size is None else str(size) for size in shape)

    def refusal(why: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"syntax error in symbolic shape {spec!r}: {why.removeprefix('syntax error ')}",
            where=name,
            got=f"shape {list(shape)}, input_polymorphic_shape {spec!r}",
            write=f'input_polymorphic_shape="{example}", with a name for each unknown size',
        )

    if spec is None:
        if None in shape:
            index = list(shape).index(None)
            raise refusal(f"the size of dimension {index} is not known, and has no name")
        return tuple(shape)
    try:
        found = tuple(jax_export.symbolic_shape(spec, like=tuple(shape), scope=scope))
    except (ValueError, TypeError, AssertionError) as error:
        raise refusal(first_line(error)) from error
    if len(found) != len(shape):
        raise refusal(f"{len(found)} sizes for {len(shape)} dimensions")
    for index, (known, size) in enumerate(zip(shape, found)):
        if isinstance(size, int) and known != size:
            raise refusal(f"dimension {index} is {'not known' if known is None else known}")
    return found


def shapes_of_results(
    results: Sequence[tuple], symbolic_shapes: Sequence[tuple], shapes: Sequence[Sequence]
) -> list[list[int | None]]:
    """Returns the shapes of results as numbers, where these follow from known sizes."""
    found: dict[str, int] = {}
    for names, numbers in zip(symbolic_shapes, shapes):
        for name, number in zip(map(str, names), numbers):
            if number is not None and name.isidentifier():
                found[name] = int(number)

    def known(size: Size) -> int | None:
        text = size if isinstance(size, int) else str(size)
        return dimensions.value(text, found) if set(dimensions.names(text)) <= set(found) else None

    return [list(map(known, shape)) for shape in results]
