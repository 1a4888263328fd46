"""Models of flax, equinox, haiku and Keras, recognized by attributes; none is imported here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError, StateChangeError
from pax_export._foundations.types import PyTree
from pax_export.core import path_name
from pax_export.export.tracing.exportable import (
    ModelForm,
    ModelMethod,
    entry_of,
    hide_params,
    methods_of,
    one_entry,
)
from pax_export.export.tracing.names import distinct_names, function_name, unwrap_static

T = TypeVar("T")


class Transform(Protocol):
    """A result of `haiku.transform`: functions without variables."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


class LinenModule(Transform, Protocol):
    """A module of flax.linen; one with a scope has variables."""

    scope: Any
    unbind: Callable[[], tuple[LinenModule, PyTree]]


#: Types whose objects are callable, but not with jax arrays.
_NOT_JAX = ("keras", "tensorflow", "torch")
_NO_KEYS = (
    "The module is called with variables that stay, and without random keys, as it is served; "
    'write kwargs={"train": False}, or what else it has for eval mode.'
)
_NO_KEY = (
    "The transform is called without a random key, as it is served; write is_training=False, or "
    "what else its function has for eval mode."
)


def nnx_form(model: PyTree) -> ModelForm:
    """Returns the form of a flax.nnx module: a static graph, and the state as tree."""
    nnx = sys.modules["flax.nnx"]
    if hasattr(nnx, "with_vars"):  # variables of hijax, and references, are no arrays
        model = nnx.with_vars(model, hijax=False, ref=False, allow_duplicates=True)
    graph, state = nnx.split(model)
    kinds = jax.tree_util.tree_map(
        lambda each: jax.tree_util.tree_map(lambda _: isinstance(each, nnx.Param), each),
        state,
        is_leaf=lambda each: isinstance(each, nnx.Variable),
    )
    trained = {path for path, kind in jax.tree_util.tree_flatten_with_path(kinds)[0] if kind}
    return ModelForm(
        type(model).__name__,
        hide_params(state),
        methods_of(model),
        to_model=lambda tree: nnx.merge(graph, unwrap_static(tree)),
        to_tree=lambda after: hide_params(nnx.split(after)[1]),
        is_trainable=trained.__contains__,
    )


def linen_form(module: LinenModule, variables: PyTree) -> ModelForm:
    """A module of flax.linen, which gets its variables in each call."""

    def method(name: str) -> ModelMethod | None:
        function = getattr(type(module), name, None)
        apply = functools.partial(module.apply, method=name)
        return dataclasses.replace(entry_of(apply), signature_of=function) if function else None

    name = type(module).__name__
    tree = hide_params(variables)
    return ModelForm(name, tree, method, is_trainable=_is_in_params, advice=_NO_KEYS)


def _is_in_params(path: tuple) -> bool:
    return getattr(path[0], "key", None) == "params"


def keras_form(model: Any) -> ModelForm:
    """A model or layer of Keras 3, which gets its variables in each call.

    `stateless_call` would drop the states of recurrent layers with ``stateful=True``, which Keras
    counts among no variables. Source:
    https://keras.io/api/layers/base_layer/#stateless_call-method
    """
    if not model.built:
        raise InvalidArgumentTypeError(
            f"Keras model {model.name}: it has no variables yet.",
            got="a model that is not built",
            write="model.build(...), or one call of it with example inputs, first",
        )
    keras = sys.modules["keras"]
    known = (*model.trainable_variables, *model.non_trainable_variables)
    every = (*known, *_keras_variables(model, set()))
    variables = list({id(each): each for each in every}.values())
    names = distinct_names(each.path for each in variables)
    count = len(model.trainable_variables)
    parameters = inspect.signature(model.call).parameters.values()
    has_mode = any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)

    def call(values: dict[str, Any], *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        mode = ({"training": False} if has_mode else {}) | kwargs
        before = list(zip(variables, map(values.get, names)))
        run = model.call if model.dtype_policy.quantization_mode is None else model.quantized_call
        with keras.StatelessScope(state_mapping=before) as scope:
            output = run(*args, **mode)
        if len(scope.state_mapping) > len(variables):
            raise StateChangeError(
                "A call assigns variables that are attributes of no layer of the model.",
                where=type(model).__name__,
                write="the variables as attributes of a layer",
            )
        after = map(scope.get_current_value, variables)
        return output, values | dict(zip(names[count:], list(after)[count:]))

    tree = hide_params({name: each.value for name, each in zip(names, variables)})
    method = one_entry(ModelMethod(call, model.call, skip=0))
    trained = set(names[:count])
    is_trainable = lambda path: path[0].key in trained  # noqa: E731
    return ModelForm(type(model).__name__, tree, method, is_trainable=is_trainable)


def _keras_variables(value: PyTree, seen: set[int]) -> Iterator[Any]:
    """Yields the variables in the attributes of a layer of Keras, and of the layers in it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, sys.modules["keras"].Variable):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _keras_variables(each, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _keras_variables(each, seen)
    elif is_keras(value):
        yield from _keras_variables(vars(value), seen)


def haiku_form(transformed: Transform, params: PyTree, *state: PyTree) -> ModelForm:
    """Returns the form of a haiku transform, called with params, state, and no random key."""
    apply = transformed.apply
    parameters = list(inspect.signature(apply).parameters)
    has_state = parameters[1:2] == ["state"]
    if has_state and not state:
        params, *rest = params
        state = tuple(rest)
    key = (None,) if "rng" in parameters[1:3] else ()

    def call(values: Any, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        if not has_state:
            return apply(values, *key, *args, **kwargs), values
        output, after = apply(values["params"], values["state"], *key, *args, **kwargs)
        return output, {"params": values["params"], "state": after}

    tree = hide_params({"params": params, "state": state[0]} if has_state else params)
    name = function_name(getattr(apply, "_original_fn", apply))
    method = one_entry(ModelMethod(call, apply, skip=1 + has_state + len(key)))
    is_trainable = _is_in_params if has_state else lambda path: True
    advice = _NO_KEY if key else ""
    return ModelForm(name, tree, method, is_trainable=is_trainable, advice=advice)


def advice_for(form: ModelForm) -> str:
    """The note that is added to errors of a call."""
    layers = ", ".join(f"{at or 'the model'}: {kind}" for at, kind in train_mode_of(form).items())
    instead = "equinox.nn.inference_mode(model) gives the model as it is served."
    return f"Layers are in train mode ({layers}); {instead}" if layers else form.advice


def train_mode_of(form: ModelForm) -> dict[str, str]:
    """The classes of the Equinox layers in train mode, by path."""
    model = unwrap_static(form.tree)
    settings, _ = jax.tree_util.tree_flatten_with_path(model)
    return {
        path_name(path[:-1]): _class_at(model, path[:-1])
        for path, value in settings
        if _is_train_mode(path, value)
    }


def with_eval_mode(form: ModelForm, kind: str) -> Any:
    """The tree of a model with its Equinox layers of a class in eval mode."""
    model = unwrap_static(form.tree)

    def served(path: tuple, value: T) -> T | bool:
        return value if not _is_train_mode(path, value) else _class_at(model, path[:-1]) == kind

    return form.to_tree(jax.tree_util.tree_map_with_path(served, model))


def _is_train_mode(path: tuple, value: object) -> bool:
    return value is False and path_name(path[-1:]) == "inference"


def _class_at(model: PyTree, path: tuple) -> str:
    for step in path:
        if hasattr(step, "name"):
            model = getattr(model, step.name)
        else:
            model = model[step.key if hasattr(step, "key") else step.idx]
    return type(model).__name__


def with_states_of(before: T, after: T) -> T:
    """Returns a model after a call, which uses up an `equinox.nn.State`, with those of before."""
    if not any(map(_is_state, jax.tree_util.tree_leaves(after, is_leaf=_is_state))):
        return after
    return jax.tree_util.tree_map(
        lambda new, old: old if _is_state(new) else new, after, before, is_leaf=_is_state
    )


def is_nnx(value: object) -> bool:
    return _derives_from(value, "flax.nnx.", "Module")


def _is_state(value: object) -> bool:
    return _derives_from(value, "equinox.", "State")


def is_linen(value: object) -> TypeGuard[LinenModule]:
    return _derives_from(value, "flax.linen.", "Module")


def is_keras(value: object) -> bool:
    return _derives_from(value, "keras.", "Layer") and hasattr(value, "stateless_call")


def keras_backend() -> str:
    return sys.modules["keras"].config.backend()


def _derives_from(value: object, package: str, name: str) -> bool:
    bases = type(value).__mro__
    return any(b.__name__ == name and b.__module__.startswith(package) for b in bases)


def is_not_jax(value: object) -> bool:
    return any(base.__module__.split(".")[0] in _NOT_JAX for base in type(value).__mro__)


def is_transform(value: object) -> TypeGuard[Transform]:
    """Returns whether this is a result of `haiku.transform`."""
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "apply")
