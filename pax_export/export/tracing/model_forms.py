"""The accepted forms of models: modules, functions, flax, equinox, haiku, Keras.

Other libraries are recognized by attributes, and never imported here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from pax_export._foundations.errors import InvalidArgumentTypeError, StateChangeError
from pax_export._foundations.types import PyTree
from pax_export.core import is_array, path_name
from pax_export.export.tracing.spec import distinct_names
from pax_export.export.tracing.static import is_no_array, unwrap_static, wrap_static

EXPECTED = (
    "a Module, a function, (params, function), a bound method, a functools.partial, a module of "
    "equinox or flax.nnx, a Keras model with the jax backend, (linen module, variables), or "
    "(haiku transform, params)"
)
CALL = "__call__"
#: Programs of jax that it cannot trace any more.
_LOWERED = (jax.stages.Lowered, jax.stages.Compiled)
#: Types whose objects are callable, but not with jax arrays.
_NOT_JAX = ("keras", "tensorflow", "torch")


@dataclass(frozen=True)
class ModelMethod:
    """One way to call a model; in an `Exportable`, with the key of its signature."""

    call: Callable[..., tuple[Any, Any]]  # (model, inputs) -> (output, model afterwards)
    signature_of: Callable  # its parameters name the inputs ...
    skip: int = 1  # ... after this many parameters for the model
    key: str = ""
    trains: bool = False  # a training step, which changes leaves


def entry_of(function: Callable) -> ModelMethod:
    """The entry of a function ``(model, *inputs)``."""

    def call(model: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        return function(model, *args, **kwargs), model

    return ModelMethod(call, function)


def hold_params(tree: PyTree) -> Any:
    """Hides leaves that are neither arrays nor numbers."""
    return wrap_static(tree, is_no_array)


def _hold_settings(tree: PyTree) -> Any:
    """Hides leaves that are no arrays: the numbers in a model are its settings."""
    return wrap_static(tree, lambda leaf: not is_array(leaf))


def _hold_parts(tree: PyTree) -> Any:
    """Hides leaves of params that are neither arrays nor numbers, and all settings of models."""
    if not any(map(callable, jax.tree.leaves(tree, is_leaf=callable))):
        return hold_params(tree)
    hold = lambda part: (_hold_settings if callable(part) else hold_params)(part)  # noqa: E731
    return jax.tree.map(hold, tree, is_leaf=callable)


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
        train_mode: the classes of layers in train mode, by path.
    """

    name: str
    tree: PyTree
    method: Callable[[str], ModelMethod | None]
    to_model: Callable[[Any], Any] = unwrap_static
    to_tree: Callable[[Any], Any] = hold_params
    is_trainable: Callable[[tuple], bool] = lambda path: True
    advice: str = ""
    train_mode: Mapping[str, str] = field(default_factory=dict)

    def with_eval_mode(self, kind: str) -> Any:
        """The tree with the layers of a class in eval mode, of those in `train_mode`."""
        paths = {path for path, name in self.train_mode.items() if name == kind}
        settings = jax.tree_util.tree_map_with_path(
            lambda path, value: value if _layer_of(path) not in paths else True,
            unwrap_static(self.tree),
        )
        return self.to_tree(settings)


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
    if _is_nnx(model):
        return _nnx_form(model)
    if _is_keras(model) and _keras_backend() == "jax":
        return _keras_form(model)
    if _is_linen(model) and model.scope is not None:
        return _linen_form(*model.unbind())
    if isinstance(model, (type, *_LOWERED)) or _is_linen(model) or _is_not_jax(model):
        raise _no_model(model)
    if not callable(model):
        raise _no_model(model)
    if _is_partial(model):
        return _partial_form(model)
    return _pytree_form(model) if _is_pytree(model) else _function_form(model)


def _form_of_tuple(model: tuple) -> ModelForm:
    first, *rest = model or (None,)
    if _is_transform(first) and len(rest) in (1, 2):
        return _haiku_form(first, *rest)
    if len(rest) != 1 or _is_transform(model):
        raise _no_model(model)
    if _is_linen(first):
        return _linen_form(first, *rest)
    if type(first).__name__ == "GraphDef":
        return _nnx_form(sys.modules["flax.nnx"].merge(first, *rest))
    if callable(rest[0]) and not isinstance(rest[0], _LOWERED):
        return _pair_form(first, *rest)
    raise _no_model(model)


def _no_model(model: PyTree) -> InvalidArgumentTypeError:
    kind = got = type(model).__name__
    write = "one of these, such as a Module"
    if isinstance(model, type):
        kind, got = "class", f"the class {model.__name__}"
        write = f"an instance: {model.__name__}(...)"
    elif _is_keras(model):
        got = f"{kind}, with the backend {_keras_backend()}"
        write = 'the model built with KERAS_BACKEND="jax" in the environment'
    elif _is_linen(model):
        write = f"({kind}(...), variables), with variables = {kind}(...).init(key, x)"
    elif _is_transform(model):
        write = "(transformed, params), with params = transformed.init(key, x)"
    elif isinstance(model, tuple):
        got = f"({', '.join(type(each).__name__ for each in model)})"
    parts = model if isinstance(model, tuple) else (model,)
    if any(isinstance(each, _LOWERED) for each in parts):
        write = "the jitted function itself, or its .trace(...), without .lower() and .compile()"
    what = f"An object of type {kind} is not a model; expected {EXPECTED}."
    return InvalidArgumentTypeError(what, got=got, write=write)


# --- functions, and arguments bound to them -----------------------------------------------


def unbind(model: PyTree) -> tuple[Any, Callable | None]:
    """Returns the model inside a bound method, a partial or a jitted function, and the function.

    The function takes the model as its first argument. It is None for a bare model, and for a
    function without a model.
    """
    model = _without_cache(model)
    if _is_bound_method(model) and _is_model(model.__self__):
        return model.__self__, model.__func__
    if _is_partial(model):
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
    held = inspect.getclosurevars(function).nonlocals
    return functools.partial(held["f"], *held["cached_args"])


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

    def call(_: Any, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        return function(*args, **kwargs), {}

    return _with_one_entry(function_name(function), {}, ModelMethod(call, function, skip=0))


def _partial_form(partial: Any) -> ModelForm:
    """The arrays that are bound in a partial are params, under the names of the arguments."""
    first, named = partial.args, dict(partial.keywords)
    names = _names_of_first(partial.func, len(first))

    def call(bound: Any, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        before = [bound[name] for name in names]
        by_name = {name: bound[name] for name in named} | kwargs
        return partial.func(*before, *args, **by_name), bound

    left = functools.partial(partial.func, *first, **named)
    bound = dict(zip(names, first)) | named
    entry = ModelMethod(call, left, skip=0)
    form = _with_one_entry(function_name(partial), _hold_settings(bound), entry)
    return _with_modes(dataclasses.replace(form, to_tree=_hold_settings), bound)


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
    if _is_nnx(params):
        return _called_by(_nnx_form(params), function)
    name = function_name(function)
    if name == _NAMELESS and callable(params):
        name = type(params).__name__
    form = _with_one_entry(name, _hold_parts(params), entry_of(function))
    return _with_modes(dataclasses.replace(form, to_tree=_hold_parts), params)


def _with_one_entry(name: str, tree: PyTree, entry: ModelMethod) -> ModelForm:
    return ModelForm(name, tree, lambda given: entry if given == CALL else None)


_NAMELESS = "function"


def function_name(function: Any) -> str:
    """The name of a function, or of the class of a callable."""
    if _is_bound_method(function):
        return function_name(function.__self__)
    inner = function.func if _is_partial(function) else getattr(function, "__wrapped__", None)
    if inner is not None:
        return function_name(inner)
    name = getattr(function, "__name__", type(function).__name__)
    return _NAMELESS if name == "<lambda>" else name


# --- models of other libraries ----------------------------------------------------------


def _pytree_form(model: PyTree) -> ModelForm:
    """A pytree that can be called, as a module of equinox is."""
    tree, name = _hold_settings(model), type(model).__name__
    return _with_modes(ModelForm(name, tree, _methods_of(model), to_tree=_hold_settings), model)


def _with_modes(form: ModelForm, model: PyTree) -> ModelForm:
    """Returns the form with the Equinox layers in train mode."""
    settings, _ = jax.tree_util.tree_flatten_with_path(model)
    found = [path for path, value in settings if value is False and _layer_of(path) is not None]
    layers = {str(_layer_of(path)): _class_at(model, path[:-1]) for path in found}
    if not layers:
        return form
    names = ", ".join(f"{path or 'the model'}: {kind}" for path, kind in layers.items())
    advice = (
        f"Layers are in train mode ({names}); equinox.nn.inference_mode(model) gives the model "
        "as it is served."
    )
    return dataclasses.replace(form, advice=advice, train_mode=layers)


def _layer_of(path: tuple) -> str | None:
    """Returns the path of the layer whose mode is at a path, or None."""
    return path_name(path[:-1]) if path_name(path[-1:]) == "inference" else None


def _class_at(model: PyTree, path: tuple) -> str:
    for step in path:
        if hasattr(step, "name"):
            model = getattr(model, step.name)
        else:
            model = model[step.key if hasattr(step, "key") else step.idx]
    return type(model).__name__


_NO_KEYS = (
    "The module is called with variables that stay, and without random keys, as it is served; "
    'write kwargs={"train": False}, or what else it has for eval mode.'
)
_NO_KEY = (
    "The transform is called without a random key, as it is served; write is_training=False, or "
    "what else its function has for eval mode."
)


def _methods_of(model: PyTree) -> Callable[[str], ModelMethod | None]:
    def method(name: str) -> ModelMethod | None:
        function = getattr(type(model), name, None)
        return entry_of(function) if callable(function) else None

    return method


def _nnx_form(model: PyTree) -> ModelForm:
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
        hold_params(state),
        _methods_of(model),
        to_model=lambda tree: nnx.merge(graph, unwrap_static(tree)),
        to_tree=lambda after: hold_params(nnx.split(after)[1]),
        is_trainable=trained.__contains__,
    )


def _linen_form(module: Any, variables: Any) -> ModelForm:
    """A module of flax.linen, which is given its variables in each call."""

    def method(name: str) -> ModelMethod | None:
        function = getattr(type(module), name, None)
        apply = functools.partial(module.apply, method=name)
        return dataclasses.replace(entry_of(apply), signature_of=function) if function else None

    tree, name = hold_params(variables), type(module).__name__
    return ModelForm(name, tree, method, is_trainable=_is_in_params, advice=_NO_KEYS)


def _is_in_params(path: tuple) -> bool:
    return getattr(path[0], "key", None) == "params"


def _keras_form(model: Any) -> ModelForm:
    """A model or layer of Keras 3, which is given its variables in each call.

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

    def call(values: Any, *args: PyTree, **kwargs: PyTree) -> tuple[Any, Any]:
        mode = ({"training": False} if has_mode else {}) | kwargs
        given = list(zip(variables, map(values.get, names)))
        run = model.call if model.dtype_policy.quantization_mode is None else model.quantized_call
        with keras.StatelessScope(state_mapping=given) as scope:
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
    form = _with_one_entry(type(model).__name__, tree, ModelMethod(call, model.call, skip=0))
    trained = set(names[:count])
    return dataclasses.replace(form, is_trainable=lambda path: path[0].key in trained)


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
    elif _is_keras(value):
        yield from _keras_variables(vars(value), seen)


def _haiku_form(transformed: Any, params: PyTree, *state: PyTree) -> ModelForm:
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
    entry = ModelMethod(call, apply, skip=1 + has_state + len(key))
    form = _with_one_entry(name, hold_params(tree), entry)
    form = dataclasses.replace(form, advice=_NO_KEY if key else "")
    return dataclasses.replace(form, is_trainable=_is_in_params) if has_state else form


def with_states_of(before: PyTree, after: PyTree) -> Any:
    """Returns a model after a call, which uses up an `equinox.nn.State`, with those of before."""
    if not any(map(_is_state, jax.tree_util.tree_leaves(after, is_leaf=_is_state))):
        return after
    return jax.tree_util.tree_map(
        lambda new, old: old if _is_state(new) else new, after, before, is_leaf=_is_state
    )


# --- kinds of objects --------------------------------------------------------------------


def _is_pytree(value: PyTree) -> bool:
    return not jax.tree_util.all_leaves([value])


def _is_model(value: PyTree) -> bool:
    """Returns whether an object has a model's arrays in a known place."""
    return _is_pytree(value) or _is_nnx(value)


def _is_nnx(value: PyTree) -> bool:
    return _derives_from(value, "flax.nnx.", "Module")


def _is_state(value: PyTree) -> bool:
    return _derives_from(value, "equinox.", "State")


def _is_linen(value: PyTree) -> bool:
    return _derives_from(value, "flax.linen.", "Module")


def _is_keras(value: PyTree) -> bool:
    return _derives_from(value, "keras.", "Layer") and hasattr(value, "stateless_call")


def _keras_backend() -> str:
    return sys.modules["keras"].config.backend()


def _derives_from(value: PyTree, package: str, name: str) -> bool:
    bases = type(value).__mro__
    return any(b.__name__ == name and b.__module__.startswith(package) for b in bases)


def _is_not_jax(value: PyTree) -> bool:
    return any(base.__module__.split(".")[0] in _NOT_JAX for base in type(value).__mro__)


def _is_transform(value: PyTree) -> bool:
    """Returns whether this is a result of `haiku.transform`."""
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "apply")


def _is_bound_method(value: PyTree) -> bool:
    return isinstance(value, types.MethodType) or (
        hasattr(value, "__self__") and hasattr(value, "__func__")  # as in equinox
    )


def _is_partial(value: PyTree) -> bool:
    alike = all(hasattr(value, name) for name in ("func", "args", "keywords"))  # as in equinox
    return isinstance(value, functools.partial) or alike
