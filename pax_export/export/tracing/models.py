"""Makes an `Exportable` of a module, a function, or a model of another library."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeGuard, TypeVar

import jax

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, PyTree
from pax_export.core import (
    Module,
    enable_eval_mode,
    module_and_value,
    named_modules,
    select_parameters,
)
from pax_export.export.artifact.report import DEFAULT
from pax_export.export.tracing.exportable import (
    CALL,
    Exportable,
    Model,
    ModelForm,
    ModelMethod,
    entry_of,
    hide_parts,
    hide_settings,
    make_leaves,
    methods_of,
    one_entry,
)
from pax_export.export.tracing.libraries import (
    advice_for,
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
    with_states_of,
)
from pax_export.export.tracing.names import (
    NAMELESS,
    BoundMethod,
    function_name,
    is_bound_method,
    is_partial,
)
from pax_export.precision import policy_of

P = ParamSpec("P")
M = TypeVar("M", bound=Module)
T = TypeVar("T")


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
    leaves, tree = make_leaves(module, trainable.__contains__)
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
            advice = advice_for(form)
            if advice and advice not in getattr(error, "__notes__", ()):
                error.add_note(advice)
            raise
        # A module of another library changes in place; states of equinox are used up.
        after = form.to_tree(with_states_of(form.to_model(tree), after))
        same = jax.tree_util.tree_structure(after) == jax.tree_util.tree_structure(tree)
        return output, after if same else tree

    leaves, tree = make_leaves(form.tree, form.is_trainable)
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
    return ModelForm(function_name(function), {}, one_entry(entry))


def _partial_form(partial: functools.partial[Any]) -> ModelForm:
    """The arrays that are bound in a partial are params, under the names of the arguments."""
    first, named = partial.args, dict(partial.keywords)
    names = _names_of_first(partial.func, len(first))

    def call(bound: Mapping[str, Any], *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        before = [bound[name] for name in names]
        by_name = {name: bound[name] for name in named} | kwargs
        return partial.func(*before, *args, **by_name), bound

    left = functools.partial(partial.func, *first, **named)
    tree = hide_settings(dict(zip(names, first)) | named)
    entry = one_entry(ModelMethod(call, left, skip=0))
    return ModelForm(function_name(partial), tree, entry, to_tree=hide_settings)


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
    entry = one_entry(entry_of(function))
    return ModelForm(name, hide_parts(params), entry, to_tree=hide_parts)


def _pytree_form(model: Model) -> ModelForm:
    """A pytree that can be called, as a module of equinox is."""
    tree, methods = hide_settings(model), methods_of(model)
    return ModelForm(type(model).__name__, tree, methods, to_tree=hide_settings)


def _is_pytree(value: Model) -> bool:
    return not jax.tree_util.all_leaves([value])


def _is_model(value: Model) -> bool:
    """Returns whether an object has a model's arrays in a known position."""
    return _is_pytree(value) or is_nnx(value)
