"""The accepted kinds of models: modules, functions, and models of other libraries."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.types import PyTree
from pax_export.export.tracing.libraries import (
    haiku_form,
    is_keras,
    is_linen,
    is_nnx,
    is_not_jax,
    is_transform,
    keras_backend,
    keras_form,
    linen_form,
    nnx_form,
)
from pax_export.export.tracing.model_form import (
    CALL,
    NAMELESS,
    ModelForm,
    ModelMethod,
    entry_of,
    function_name,
    hide_parts,
    hide_settings,
    is_bound_method,
    is_partial,
    methods_of,
    one_entry,
)

EXPECTED = (
    "an instance of a Module, a function (jitted, but not lowered), (params, function), a bound "
    "method, a functools.partial, a module of equinox or flax.nnx, a Keras model built with "
    "KERAS_BACKEND=jax, (linen module, module.init(key, x)), or (haiku transform, its params)"
)
#: Programs of jax that it cannot trace any more.
_LOWERED = (jax.stages.Lowered, jax.stages.Compiled)


def form_of(model: PyTree) -> ModelForm:
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


def _form_of_object(model: PyTree) -> ModelForm:
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


def _no_model(model: PyTree) -> InvalidArgumentTypeError:
    got = ", ".join(
        f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
        for each in (model if type(model) is tuple else (model,))
    )
    return InvalidArgumentTypeError("This is not a model.", got=got, write=EXPECTED)


def unbind(model: PyTree) -> tuple[Any, Callable | None]:
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
    if hasattr(model, "__wrapped__") and hasattr(model, "lower"):  # a jitted function
        owner, function = unbind(model.__wrapped__)
        if function is not None or _is_model(owner):
            return owner, function
    return model, None


def _without_cache(function: Any) -> Any:
    """Returns a `flax.nnx.cached_partial`, which has the signature of its function, as partial."""
    if getattr(getattr(function, "__code__", None), "co_name", "") != "cache_args_wrapper":
        return function
    closure = inspect.getclosurevars(function).nonlocals
    return functools.partial(closure["f"], *closure["cached_args"])


def _with_bound(function: Callable, partial: Any) -> Callable:
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


def _function_form(function: Callable) -> ModelForm:
    """Returns the form of a function without params; its closure becomes constants."""

    def call(_: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        return function(*args, **kwargs), {}

    entry = ModelMethod(call, function, skip=0)
    return ModelForm.of(function_name(function), {}, one_entry(entry))


def _partial_form(partial: Any) -> ModelForm:
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


def _pytree_form(model: PyTree) -> ModelForm:
    """A pytree that can be called, as a module of equinox is."""
    return ModelForm.of(type(model).__name__, model, methods_of(model), hide_settings)


def _is_pytree(value: PyTree) -> bool:
    return not jax.tree_util.all_leaves([value])


def _is_model(value: PyTree) -> bool:
    """Returns whether an object has a model's arrays in a known position."""
    return _is_pytree(value) or is_nnx(value)
