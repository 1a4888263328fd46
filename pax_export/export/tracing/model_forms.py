"""The accepted kinds of models: modules, functions, and models of other libraries.

Those are recognized by attributes, and the libraries are never imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, Protocol, TypeGuard, TypeVar

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError, StateChangeError
from pax_export._foundations.types import PyTree
from pax_export.export.tracing.model_form import (
    CALL,
    NAMELESS,
    BoundMethod,
    Model,
    ModelForm,
    ModelMethod,
    entry_of,
    function_name,
    hide_params,
    hide_parts,
    hide_settings,
    is_bound_method,
    is_partial,
    methods_of,
    one_entry,
)
from pax_export.export.tracing.names import distinct_names, unwrap_static

P = ParamSpec("P")
T = TypeVar("T")


class Transform(Protocol):
    """A result of `haiku.transform`: functions without variables."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


class LinenModule(Transform, Protocol):
    """A module of flax.linen; one with a scope has variables."""

    scope: Any
    unbind: Callable[[], tuple[LinenModule, PyTree]]


class JittedFunction(Protocol):
    """A function that `jax.jit` or `equinox.filter_jit` has made of another."""

    __wrapped__: Callable[..., Any]
    lower: Callable[..., Any]


EXPECTED = (
    "an instance of a Module, a function (jitted, but not lowered), (params, function), a bound "
    "method, a functools.partial, a module of equinox or flax.nnx, a Keras model built with "
    "KERAS_BACKEND=jax, (linen module, module.init(key, x)), or (haiku transform, its params)"
)
#: Programs of jax that it cannot trace any more.
_LOWERED = (jax.stages.Lowered, jax.stages.Compiled)


def form_of(model: Model) -> ModelForm:
    """The form of a model that is not a module of this package.

    Raises:
        InvalidArgumentTypeError: this is no model.
    """
    owner, function = unbind(model)
    if function is None:
        return _form_of_object(owner)
    # A pytree with a method needs no `__call__`: a distribution has `log_prob`.
    form = _form_of_object(owner) if callable(owner) else _pytree_form(owner)
    return _called_by(form, function)


def _form_of_object(model: Model) -> ModelForm:
    if isinstance(model, tuple):
        return _form_of_tuple(model)
    if is_nnx(model):
        return nnx_form(model)
    if is_keras(model) and keras_backend() == "jax":
        return keras_form(model)
    if is_linen(model) and model.scope is not None:
        return linen_form(*model.unbind())
    if isinstance(model, (type, *_LOWERED)) or is_linen(model) or is_not_jax(model):
        raise _no_model(model)
    if not callable(model):
        raise _no_model(model)
    if is_partial(model):
        return _partial_form(model)
    return _pytree_form(model) if _is_pytree(model) else _function_form(model)


def _form_of_tuple(model: tuple) -> ModelForm:
    first, *rest = model or (None,)
    if is_transform(first) and len(rest) in (1, 2):
        return haiku_form(first, *rest)
    if len(rest) != 1 or is_transform(model):
        raise _no_model(model)
    if is_linen(first):
        return linen_form(first, *rest)
    if type(first).__name__ == "GraphDef":
        return nnx_form(sys.modules["flax.nnx"].merge(first, *rest))
    if callable(rest[0]) and not isinstance(rest[0], _LOWERED):
        return _pair_form(first, *rest)
    raise _no_model(model)


def _no_model(model: object) -> InvalidArgumentTypeError:
    got = ", ".join(
        f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
        for each in (model if type(model) is tuple else (model,))
    )
    return InvalidArgumentTypeError("This is not a model.", got=got, write=EXPECTED)


def unbind(model: Model) -> tuple[Any, Callable[..., Any] | None]:
    """Returns the model inside a bound method, a partial or a jitted function, and the function.

    The function takes the model as its first argument. It is None for a bare model, and for a
    function without a model.
    """
    model = _without_cache(model)
    if is_bound_method(model) and _is_model(model.__self__):
        return model.__self__, model.__func__
    if is_partial(model):
        owner, function = unbind(model.func)
        if function is not None or _is_model(owner):
            return owner, _with_bound(function or operator.call, model)
    if _is_jitted(model):
        owner, function = unbind(model.__wrapped__)
        if function is not None or _is_model(owner):
            return owner, function
    return model, None


def _is_jitted(model: Model | BoundMethod) -> TypeGuard[JittedFunction]:
    return hasattr(model, "__wrapped__") and hasattr(model, "lower")


def _without_cache(function: Model) -> Any:
    """Returns a `flax.nnx.cached_partial`, which has the signature of its function, as partial."""
    if getattr(getattr(function, "__code__", None), "co_name", "") != "cache_args_wrapper":
        return function
    closure = inspect.getclosurevars(function).nonlocals  # type: ignore  # a function
    return functools.partial(closure["f"], *closure["cached_args"])


def _with_bound(
    function: Callable[..., Any], partial: functools.partial[Any]
) -> Callable[..., Any]:
    """The function of a model and the inputs that a partial leaves open."""

    def call(model: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        return function(model, *partial.args, *args, **{**partial.keywords, **kwargs})

    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
    left = inspect.signature(functools.partial(partial.func, *partial.args, **partial.keywords))
    call.__signature__ = left.replace(parameters=[model, *left.parameters.values()])  # type: ignore[attr-defined]
    return call


def _called_by(form: ModelForm, function: Callable) -> ModelForm:
    """Returns the form of a model called through another function."""
    entry = entry_of(function)
    method = lambda name: entry if name == CALL else form.method(name)  # noqa: E731
    return dataclasses.replace(form, method=method)


def _function_form(function: Callable[P, Any]) -> ModelForm:
    """Returns the form of a function without params; its closure becomes constants."""

    def call(_: dict[str, Any], *args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        return function(*args, **kwargs), {}

    entry = ModelMethod(call, function, skip=0)
    return ModelForm.of(function_name(function), {}, one_entry(entry))


def _partial_form(partial: functools.partial[Any]) -> ModelForm:
    """The arrays that are bound in a partial are params, under the names of the arguments."""
    first, named = partial.args, dict(partial.keywords)
    names = _names_of_first(partial.func, len(first))

    def call(bound: Mapping[str, Any], *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        before = [bound[name] for name in names]
        by_name = {name: bound[name] for name in named} | kwargs
        return partial.func(*before, *args, **by_name), bound

    left = functools.partial(partial.func, *first, **named)
    bound = dict(zip(names, first)) | named
    entry = ModelMethod(call, left, skip=0)
    return ModelForm.of(function_name(partial), bound, one_entry(entry), hide_settings)


def _names_of_first(function: Callable, count: int) -> list[str]:
    """The names of the first parameters of a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        parameters = ()
    names = [each.name for each in parameters if each.kind in _BY_POSITION][:count]
    return [*names, *(f"arg{index}" for index in range(len(names), count))]


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _pair_form(params: PyTree, function: Callable) -> ModelForm:
    if is_nnx(params):
        return _called_by(nnx_form(params), function)
    name = function_name(function)
    if name == NAMELESS and callable(params):
        name = type(params).__name__
    return ModelForm.of(name, params, one_entry(entry_of(function)), hide_parts)


def _pytree_form(model: Model) -> ModelForm:
    """A pytree that can be called, as a module of equinox is."""
    return ModelForm.of(type(model).__name__, model, methods_of(model), hide_settings)


def _is_pytree(value: Model) -> bool:
    return not jax.tree_util.all_leaves([value])


def _is_model(value: Model) -> bool:
    """Returns whether an object has a model's arrays in a known position."""
    return _is_pytree(value) or is_nnx(value)


# --- models of flax, equinox, haiku and Keras ----------------------------------------

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
    return ModelForm.of(name, variables, method, is_trainable=_is_in_params, advice=_NO_KEYS)


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

    tree = {name: each.value for name, each in zip(names, variables)}
    method = one_entry(ModelMethod(call, model.call, skip=0))
    trained = set(names[:count])
    is_trainable = lambda path: path[0].key in trained  # noqa: E731
    return ModelForm.of(type(model).__name__, tree, method, is_trainable=is_trainable)


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

    tree = {"params": params, "state": state[0]} if has_state else params
    name = function_name(getattr(apply, "_original_fn", apply))
    method = one_entry(ModelMethod(call, apply, skip=1 + has_state + len(key)))
    is_trainable = _is_in_params if has_state else lambda path: True
    return ModelForm.of(
        name, tree, method, is_trainable=is_trainable, advice=_NO_KEY if key else ""
    )


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
