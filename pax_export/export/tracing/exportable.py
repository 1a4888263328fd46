"""Exportable: a model of any kind as named leaves and functions of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import StructureMismatchError, UnsupportedDtypeError
from pax_export._foundations.types import ArrayLike, PyTree
from pax_export.checkpoint import StoredArray
from pax_export.core import is_array, path_name
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.names import is_no_array, unwrap_static, wrap_static

P = ParamSpec("P")
T = TypeVar("T")

#: A model as a user has it: an object that is called, or a pair such as ``(params, function)``.
Model: TypeAlias = Callable[..., Any] | tuple[Any, ...]
CALL = "__call__"


@dataclass(frozen=True)
class ModelMethod:
    """One way to call a model; in an `Exportable`, with the key of its signature."""

    call: Callable[..., tuple[Any, Any]]  # (model, inputs) -> (output, model afterwards)
    signature_of: Callable  # its parameters name the inputs ...
    skip: int = 1  # ... after this many parameters for the model
    key: str = ""
    trains: bool = False  # a training step, which changes leaves


def entry_of(function: Callable[Concatenate[T, P], Any]) -> ModelMethod:
    """The entry of a function ``(model, *inputs)``."""

    def call(model: T, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, T]:
        return function(model, *args, **kwargs), model

    return ModelMethod(call, function)


def one_entry(entry: ModelMethod) -> Callable[[str], ModelMethod | None]:
    """The methods of a model that can only be called."""
    return lambda name: entry if name == CALL else None


def methods_of(model: Model) -> Callable[[str], ModelMethod | None]:
    """The methods of the class of a model."""

    def method(name: str) -> ModelMethod | None:
        function = getattr(type(model), name, None)
        return entry_of(function) if callable(function) else None

    return method


def hide_params(tree: T) -> T:
    """Hides leaves that are neither arrays nor numbers."""
    return wrap_static(tree, is_no_array)


def hide_settings(tree: T) -> T:
    """Hides leaves that are no arrays: the numbers in a model are its settings."""
    return wrap_static(tree, lambda leaf: not is_array(leaf))


def hide_parts(tree: T) -> T:
    """Hides leaves of params that are neither arrays nor numbers, and all settings of models."""
    if not any(map(callable, jax.tree.leaves(tree, is_leaf=callable))):
        return hide_params(tree)
    hide = lambda part: (hide_settings if callable(part) else hide_params)(part)  # noqa: E731
    return jax.tree.map(hide, tree, is_leaf=callable)


@dataclass(frozen=True)
class ModelForm:
    """A model as a pytree, and functions of it.

    Attributes:
        name: the name of its class or function.
        tree: its arrays; everything else is in the structure.
        method: returns the entry of a name, such as ``"__call__"``, or None.
        to_model: converts such a tree to the argument of the model's functions.
        to_tree: converts that argument back to a tree after a call.
        is_trainable: whether the leaf at a path is a parameter.
        advice: a note added to errors of a call.
    """

    name: str
    tree: PyTree
    method: Callable[[str], ModelMethod | None]
    to_model: Callable[[Any], Any] = unwrap_static
    to_tree: Callable[[Any], Any] = hide_params
    is_trainable: Callable[[tuple], bool] = lambda path: True
    advice: str = ""


@dataclass(frozen=True)
class ExportLeaf:
    name: str  # dotted: modules.0.weight
    path: str  # unambiguous: .modules[0].weight
    value: Any  # an array, a number or a `StoredArray`
    struct: jax.ShapeDtypeStruct
    trainable: bool  # a parameter that was chosen to be trained
    parameter: bool = False


@dataclass(frozen=True)
class Exportable:
    name: str
    leaves: tuple[ExportLeaf, ...]
    tree: PyTree
    methods: tuple[ModelMethod, ...]
    form: ModelForm | None = None  # of a model that is not a module of this package

    @property
    def is_module(self) -> bool:
        """Whether it is of this package, so that state changes are known."""
        return self.form is None

    def run(
        self, method: ModelMethod, values: list[Any], args: tuple, kwargs: dict
    ) -> tuple[Any, list[Any]]:
        """Calls a method with other values of the leaves; returns the output and the new values."""
        model = jax.tree_util.tree_unflatten(self.tree, values)
        output, after = method.call(model, *args, **kwargs)
        new, tree = jax.tree_util.tree_flatten(after)
        if tree != self.tree:
            raise StructureMismatchError(
                "A call changes the structure of the model, so its state cannot be kept in "
                "variables.",
                where=method.key,
                write="a step that returns a model and an optimizer of the structure that it was "
                "given"
                if method.trains
                else "a model that has all of its arrays from the start; of a lazy module, "
                "pax.experimental.materialize(module, x) with an example input x makes one",
            )
        return output, new


def make_leaves(
    tree: PyTree, is_trainable: Callable[[tuple], bool]
) -> tuple[tuple[ExportLeaf, ...], Any]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(_make_leaf(path, value, is_trainable(path)) for path, value in paths), treedef


def _make_leaf(path: tuple, value: ArrayLike | StoredArray, trainable: bool) -> ExportLeaf:
    name = path_name(path) or "params"
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))  # jax takes no other
    struct = leaf_struct(value, name)
    trained = trainable and dtypes.is_floating(struct.dtype)
    return ExportLeaf(name, jax.tree_util.keystr(path), value, struct, trained, parameter=trained)


def leaf_struct(value: ArrayLike | StoredArray, name: str) -> jax.ShapeDtypeStruct:
    if isinstance(value, (bool, int, float, complex)):
        # Weakly typed, so that the exported arithmetic promotes as Python numbers do.
        return jax.ShapeDtypeStruct((), jax.numpy.result_type(value), weak_type=True)
    if not (
        isinstance(value, (jax.Array, np.ndarray, np.generic, StoredArray))
        and value.dtype != object
    ):
        raise UnsupportedDtypeError(
            "A leaf of the model is not an array.",
            where=name,
            got=type(value).__name__,
            write="an array, or a static attribute of the module",
        )
    dtypes.check(value.dtype, name)
    weak = bool(getattr(value, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)
