"""Training in an export: train mode, a step, and the parameters that are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from pax_export._foundations.types import PyTree, TreeDef
from pax_export.core import (
    Chosen,
    Module,
    as_filter,
    enable_eval_mode,
    path_pattern,
    require_names,
)
from pax_export.export.tracing.exportable import (
    Exportable,
    Model,
    ModelMethod,
    hide_params,
    make_leaves,
)
from pax_export.export.tracing.models import make_exportable, unbind
from pax_export.export.tracing.names import unwrap_static
from pax_export.transforms import All, Not, PathContains, PathIn
from pax_export.transforms import Any as Any_

if TYPE_CHECKING:
    from pax_export.core import Selector


def with_train_mode(
    chosen: Exportable, model: Model, key: str, function: Callable[..., Any] | str | None
) -> Exportable:
    """Adds the first method in train mode, or a function that calls the model so."""
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
        training = _training_structure(model)

        def run(tree: Module, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
            training_model = jax.tree_util.tree_unflatten(training, jax.tree_util.tree_leaves(tree))
            output, after = method.call(training_model, *args, **kwargs)
            return output, enable_eval_mode(after)

    return replace(
        chosen, methods=(*chosen.methods, replace(method, call=run, key=key, trains=True))
    )


def _training_structure(model: Model) -> TreeDef:
    """The structure of a module in train mode, or as it is if any layer trains already."""
    owner, _ = unbind(model)
    return jax.tree_util.tree_structure(owner if owner.training else owner.train())


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
    if chosen.form is None:
        training = _training_structure(model)
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

    leaves, _ = make_leaves(optimizer, lambda path: False)
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
