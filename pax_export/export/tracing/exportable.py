"""Exportable: a model as named leaves and functions of their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    StructureMismatchError,
    UnsupportedDtypeError,
)
from pax_export._foundations.types import Array, ArrayLike, PyTree
from pax_export.checkpoint import StoredArray
from pax_export.core import (
    Chosen,
    Module,
    as_filter,
    enable_eval_mode,
    module_and_value,
    named_modules,
    path_name,
    path_pattern,
    require_names,
    select_parameters,
)
from pax_export.export.artifact.report import DEFAULT
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.model_form import (
    CALL,
    Model,
    ModelForm,
    ModelMethod,
    entry_of,
    hide_params,
)
from pax_export.export.tracing.model_forms import form_of, unbind, with_states_of
from pax_export.export.tracing.names import unwrap_static
from pax_export.precision import policy_of
from pax_export.transforms import All, Not, PathContains, PathIn
from pax_export.transforms import Any as Any_

if TYPE_CHECKING:
    from pax_export.core import Selector

P = ParamSpec("P")
M = TypeVar("M", bound=Module)
T = TypeVar("T")


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


def make_exportable(
    model: Model, methods: Mapping[str, Any] | None, outputs: str = "float32"
) -> Exportable:
    """The `Exportable` of a model, with float32 for half-precision outputs unless ``"model"``."""
    owner, function = unbind(model)
    if isinstance(owner, Module):
        return _of_module(owner, methods, function, outputs)
    return _of_form(form_of(model), methods)


def _of_module(
    module: Module, methods: Mapping[str, Any] | None, function: Callable | None, outputs: str
) -> Exportable:
    """Makes an Exportable of a module, whose call is that of its class or another function."""
    module.scan_bugs()
    module = enable_eval_mode(module)
    paths, _ = jax.tree_util.tree_flatten_with_path(select_parameters(module))
    trainable = {path for path, _ in paths}
    halves = _halves_of_policies(module) if outputs == "float32" else frozenset()

    def find(method: str | Callable[..., Any] | None) -> ModelMethod | None:
        if method == CALL and function is not None:
            method = function
        elif isinstance(method, str):  # not a method of the metaclass, which makes instances
            owners = type(module).__mro__
            method = next((vars(owner)[method] for owner in owners if method in vars(owner)), None)
        return ModelMethod(_with_state(method, halves), method) if callable(method) else None

    name = type(module).__name__
    leaves, tree = _make_leaves(module, trainable.__contains__)
    entries = _make_methods(methods, name, find)
    return Exportable(name, leaves, tree, entries)


def _with_state(
    function: Callable[Concatenate[M, P], Any], halves: frozenset
) -> Callable[Concatenate[M, P], tuple[Any, M]]:
    """Returns the call of a function of a module, with outputs of some dtypes as float32."""

    def widened(leaf: Array) -> Array:
        is_half = getattr(leaf, "dtype", None) in halves
        return jax.numpy.asarray(leaf, "float32") if is_half else leaf

    def call(model: M, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, M]:
        after, output = module_and_value(function)(model, *args, **kwargs)
        return jax.tree_util.tree_map(widened, output) if halves else output, after

    return call


def _halves_of_policies(module: Module) -> frozenset:
    """The dtypes of less than 32 bits in which policies of a net return their outputs."""
    policies = (policy_of(each) for _, each in named_modules(module))
    found = {jax.numpy.dtype(policy.output_dtype) for policy in policies if policy is not None}
    return frozenset(dtype for dtype in found if dtype.itemsize < 4)


def _of_form(form: ModelForm, methods: Mapping[str, Any] | None) -> Exportable:
    def find(method: str | Callable[..., Any]) -> ModelMethod | None:
        found = form.method(method) if isinstance(method, str) else None
        entry = entry_of(method) if callable(method) else found
        return None if entry is None else replace(entry, call=partial(run, entry.call))

    def run(
        call: Callable[Concatenate[Any, P], tuple[Any, Any]],
        tree: T,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Any, T]:
        try:
            output, after = call(form.to_model(tree), *args, **kwargs)
        except Exception as error:  # of the model; raised again
            if form.advice and form.advice not in getattr(error, "__notes__", ()):
                error.add_note(form.advice)
            raise
        # A module of another library changes in place; states of equinox are used up.
        after = form.to_tree(with_states_of(form.to_model(tree), after))
        same = jax.tree_util.tree_structure(after) == jax.tree_util.tree_structure(tree)
        return output, after if same else tree

    leaves, tree = _make_leaves(form.tree, form.is_trainable)
    entries = _make_methods(methods, form.name, find)
    return Exportable(form.name, leaves, tree, entries, form=form)


def _make_methods(
    methods: Mapping[str, Any] | None, owner: str, find: Callable[[Any], ModelMethod | None]
) -> tuple[ModelMethod, ...]:
    def method(key: str, function: str | Callable[..., Any]) -> ModelMethod:
        entry = find(function)
        if entry is None:
            raise InvalidArgumentError(
                f"{owner} does not have this method.",
                where=f"methods[{key!r}]",
                got=repr(function),
                write="a method of it, methods={'encode': 'encode'} with inputs={'encode': ...}, "
                "or a function that takes the model first",
            )
        return replace(entry, key=key)

    return tuple(method(key, function) for key, function in (methods or {DEFAULT: CALL}).items())


def _make_leaves(
    tree: PyTree, is_trainable: Callable[[tuple], bool]
) -> tuple[tuple[ExportLeaf, ...], Any]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(_make_leaf(path, value, is_trainable(path)) for path, value in paths), treedef


def _make_leaf(path: tuple, value: ArrayLike | StoredArray, trainable: bool) -> ExportLeaf:
    name = path_name(path) or "params"
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))  # jax takes no other
    struct = leaf_struct(value, name)
    floating = dtypes.is_floating(struct.dtype)
    trained = trainable and floating
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


def with_train_mode(
    chosen: Exportable, model: Model, key: str, function: Callable[..., Any] | str | None
) -> Exportable:
    """Adds the first method in train mode, or a function that calls the model so."""
    owner, _ = unbind(model)
    (method, *_) = chosen.methods
    if callable(function):
        (method,) = make_exportable(model, {key: function}).methods
    elif not chosen.is_module:
        raise InvalidArgumentError(
            "How a model of another library is called in train mode is not known.",
            got=f"train={function!r}",
            write="train=lambda model, x: ..., which calls it in train mode",
        )
    run = method.call
    if chosen.is_module:
        training = jax.tree_util.tree_structure(owner if owner.training else owner.train())

        def run(tree: Module, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
            training_model = jax.tree_util.tree_unflatten(training, jax.tree_util.tree_leaves(tree))
            output, after = method.call(training_model, *args, **kwargs)
            return output, enable_eval_mode(after)

    return replace(
        chosen, methods=(*chosen.methods, replace(method, call=run, key=key, trains=True))
    )


def is_training(model: Model) -> bool:
    """Whether a model is in train mode; one of another library, whose modes are unknown, is."""
    return bool(getattr(unbind(model)[0], "training", True))


def with_step(
    chosen: Exportable, model: Model, key: str, step: Callable, optimizer: PyTree
) -> Exportable:
    """Adds a training step ``(model, optimizer, *batch) -> (model, optimizer, metrics)``.

    The model is in train mode, or keeps its modes if any layer is already in train mode.
    """
    served = jax.tree_util.tree_unflatten(chosen.tree, [leaf.value for leaf in chosen.leaves])
    owner, _ = unbind(model)
    if chosen.form is None:
        training = jax.tree_util.tree_structure(owner if owner.training else owner.train())
        opened, serving = (lambda model: model), enable_eval_mode
    else:
        training = chosen.tree
        opened, serving = chosen.form.to_model, chosen.form.to_tree
    optimizer = hide_params(optimizer)

    def call(state: tuple[Any, Any], *batch: PyTree) -> tuple[Any, Any]:
        leaves = jax.tree_util.tree_leaves(state[0])
        training_model = jax.tree_util.tree_unflatten(training, leaves)
        result = step(opened(training_model), unwrap_static(state[1]), *batch)
        if not (isinstance(result, tuple) and len(result) == 3):
            raise InvalidArgumentError(
                "A training step must return (model, optimizer, metrics).",
                where=key,
                got=f"{len(result)} values" if isinstance(result, tuple) else "1 value",
                write="return model, optimizer, {'loss': loss}",
            )
        after, advanced, metrics = result
        return metrics, (serving(after), hide_params(advanced))

    leaves, _ = _make_leaves(optimizer, lambda path: False)
    named = (replace(leaf, name=f"optimizer.{leaf.name}", path=f"optimizer{leaf.path}")
             for leaf in leaves)  # fmt: skip
    methods = (
        *map(_beside_optimizer, chosen.methods),
        ModelMethod(call, step, 2, key, trains=True),
    )
    return replace(
        chosen,
        leaves=(*chosen.leaves, *named),
        tree=jax.tree_util.tree_structure((served, optimizer)),
        methods=methods,
    )


def _beside_optimizer(method: ModelMethod) -> ModelMethod:
    def call(state: tuple[Any, Any], *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        output, after = method.call(state[0], *args, **kwargs)
        return output, (after, state[1])

    return replace(method, call=call)


def layer_of(owners: Iterable[Any]) -> str:
    """Returns the name of the layer that ran last, ``encoder.norm: LayerNorm``."""
    modules = [owner for owner in owners if isinstance(owner, Module)]
    if not modules:
        return ""
    root, layer = modules[0], modules[-1]
    name = next((name for name, module in named_modules(root) if module is layer), "")
    return f"{name}: {type(layer).__name__}" if name else type(layer).__name__


def _is_filter(value: PyTree) -> bool:
    """Whether this is a filter of `pax_export.transforms` that is not also something else."""
    kinds = (All, Any_, Not, PathContains, PathIn, Chosen)
    return value is ... or isinstance(value, (type, *kinds))


def _select_leaves(model: Exportable, chosen: Selector) -> list[bool]:
    """Returns the leaves that a filter selects; none of an optimizer."""
    root = jax.tree_util.tree_unflatten(model.tree, [leaf.value for leaf in model.leaves])
    module = root[0] if any(method.trains for method in model.methods) else root
    if not isinstance(module, Module):
        raise InvalidArgumentTypeError(
            "Filters select leaves of modules; the model is not a module.",
            where="trainable",
            got=repr(chosen),
            write='names, or a prefix of the parameters: {"head": True, "body": False}',
        )
    require_names(chosen, [module], "trainable")
    mask = as_filter(chosen)(module)
    return mask + [False] * (len(model.leaves) - len(mask))


_WRITE = "train_step=step, optimizer=optimizer, train_inputs=(images, labels)"


@dataclass(frozen=True)
class TrainStep:
    function: Callable[..., Any]
    optimizer: PyTree
    inputs: PyTree

    key: ClassVar[str] = "train_step"

    @classmethod
    def of(
        cls,
        function: Callable[..., Any] | str | None,
        optimizer: PyTree,
        inputs: PyTree,
        keys: Sequence[str],
    ) -> TrainStep | None:
        if function is optimizer is inputs is None:
            return None
        if not callable(function) or inputs is None:
            raise InvalidArgumentError(
                "A training step is a function (model, optimizer, *batch) -> (model, optimizer, "
                "metrics), and requires train_inputs.",
                got=f"train_step={function!r}, train_inputs={inputs!r}",
                write=_WRITE,
            )
        if cls.key in keys:
            raise InvalidArgumentError(
                f"The key {cls.key!r} is reserved for the training step.",
                where=f"methods[{cls.key!r}]",
                write="another key",
            )
        return cls(function, optimizer, inputs)


def mark_trainable(model: Exportable, trainable: PyTree) -> Exportable:
    """The model with the chosen parameters trainable.

    Args:
        model: the model.
        trainable: True for all; a path or paths; selections of ``net.at(...)``; filters of
            `pax_export.transforms`; functions of the name and value of a leaf; or a prefix of the
            parameters with True and False.
    """
    if isinstance(trainable, bool):
        return model
    if _is_filter(trainable):
        chosen = _select_leaves(model, trainable)
        if not any(leaf.trainable and picked for leaf, picked in zip(model.leaves, chosen)):
            raise InvalidArgumentError(
                "The filter selects no trainable parameter of the model.",
                where="trainable",
                got=repr(trainable),
                write=_trainable_names(model),
            )
    elif callable(trainable):
        chosen = [bool(trainable(leaf.name, leaf.value)) for leaf in model.leaves]
    elif isinstance(trainable, str):
        chosen = _by_names(model, (trainable,))
    elif _is_prefix(trainable):
        chosen = _by_prefix(model, trainable)
    elif isinstance(trainable, Iterable):
        chosen = _by_names(model, tuple(trainable))
    else:
        raise InvalidArgumentTypeError(
            "Expected True, False, or paths of leaves.",
            where="trainable",
            got=repr(trainable),
            write="trainable=True, False, or paths of leaves: " + _trainable_names(model),
        )
    leaves = tuple(
        dataclasses.replace(leaf, trainable=leaf.trainable and picked)
        for leaf, picked in zip(model.leaves, chosen)
    )
    return dataclasses.replace(model, leaves=leaves)


def _is_prefix(trainable: PyTree) -> bool:
    leaves = jax.tree_util.tree_leaves(trainable)
    return isinstance(trainable, Mapping) or any(isinstance(leaf, bool) for leaf in leaves)


def _trainable_leaves(model: Exportable, name: str) -> list[int]:
    """Returns the trainable leaves with this name or below it, or else those of a path."""
    names = {i: leaf.name for i, leaf in enumerate(model.leaves) if leaf.trainable}
    found = [i for i, own in names.items() if f"{own}.".startswith(f"{name}.")]
    return found or [i for i, own in names.items() if path_pattern(name).covers(own)]


def _by_names(model: Exportable, names: Iterable[Any]) -> list[bool]:
    chosen = [False] * len(model.leaves)
    for name in names:
        found = _trainable_leaves(model, str(name))
        if not found:
            raise InvalidArgumentError(
                "No trainable parameter of the model has this name or prefix.",
                where="trainable",
                got=repr(name),
                write=_trainable_names(model),
            )
        for index in found:
            chosen[index] = True
    return chosen


def _trainable_names(model: Exportable) -> str:
    known = ", ".join(leaf.name for leaf in model.leaves if leaf.trainable)
    return f"some of {known}" if known else "a model with parameters"


def _by_prefix(model: Exportable, prefix: PyTree) -> list[bool]:
    tree = jax.tree_util.tree_unflatten(model.tree, list(range(len(model.leaves))))
    return list(map(bool, jax.tree.leaves(jax.tree.broadcast(prefix, tree))))
