"""The metaclass of modules: creation of classes and instances, and their pickles."""

from __future__ import annotations

import abc
import copyreg
import functools
import importlib
import inspect
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from pax_export.core._call_paths import noting_path
from pax_export.core._check import check_new
from pax_export.core._containers import KEYED, READ_ONLY, copy_containers
from pax_export.core._parameters import respecting_frozen
from pax_export.core._scopes import open_modules
from pax_export.core._static import base_of, builders_of, from_recipe, recipe_of
from pax_export.core._tree import (
    ARRAYS,
    MIXED,
    STATIC,
    Node,
    attributes_now,
    fill_node,
    kind_of,
    register_class,
    shows_static_leaves,
    update_moduledef,
)

# Values are of any class in pickles, and distinguished by it: type checkers know nothing of what is
# in them.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N", bound=Node)


class ModuleMeta(type(typing.Protocol)):  # type: ignore[misc]
    """The class of module classes; a Protocol's, so that modules can be abstract or protocols."""

    # A module is never itself a protocol, and the plain checks are much faster.
    _is_protocol = False
    __instancecheck__ = abc.ABCMeta.__instancecheck__
    __subclasscheck__ = abc.ABCMeta.__subclasscheck__

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: object
    ):
        super().__init__(name, bases, namespace, **kwargs)
        cls._pax_own = _OF_DATACLASSES & namespace.keys()
        if "__getattr__" in namespace and name != "Module":
            type.__setattr__(cls, "__getattr__", _after_ours(namespace["__getattr__"]))
        if isinstance(namespace.get("__call__"), types.FunctionType):
            type.__setattr__(cls, "__call__", noting_path(namespace["__call__"]))
        if callable(namespace.get("parameters")):
            type.__setattr__(cls, "parameters", respecting_frozen(namespace["parameters"]))
        register_class(cls)

    if not typing.TYPE_CHECKING:  # a type checker reads the constructor instead

        def __call__(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
            """Makes an instance: runs the constructor, then makes its moduledef and checks it."""
            _drop_dataclass_methods(cls)
            module = cls.__new__(cls, *args, **kwargs)
            if not isinstance(module, cls):
                return module
            with open_modules([module], constructing=True):
                module.__init__(*args, **kwargs)
            _drop_cached_properties(module)
            update_moduledef(module)
            check_new(module)
            return module

        @property
        def __signature__(cls) -> inspect.Signature:
            """The signature of the constructor, for ``help``, notebooks and docs."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


def _after_ours(users: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A user's ``__getattr__``, called only for missing attributes."""

    def __getattr__(self: Node, name: str) -> Any:
        if name.startswith("_pax_"):
            return Node.__getattr__(self, name)
        if fill_node(self):
            return getattr(self, name)
        return users(self, name)

    return __getattr__


_OF_DATACLASSES = frozenset({"__eq__", "__hash__", "__setattr__", "__delattr__"})


def _drop_dataclass_methods(cls: type) -> None:
    """Restores what `@dataclass` replaces: equality and hash by fields, a refusal in `pure`."""
    own: frozenset[str] = vars(cls)["_pax_own"]
    if "__eq__" in own:  # Python then makes the class one without a hash
        own = own | {"__hash__"}
    for name in (_OF_DATACLASSES - own) & vars(cls).keys():
        delattr(cls, name)


def _drop_cached_properties(module: Node) -> None:
    """Clears cached properties that the constructor computed."""
    attributes = vars(module)
    for name in list(attributes):
        if type(getattr(type(module), name, None)).__name__ == "cached_property":
            del attributes[name]


def new_uninitialized(cls: type[T]) -> T:
    """An instance before its constructor: without name, in train mode."""
    module = object.__new__(cls)
    attributes_now(module).update(_name=None, _training=True)
    return module


def made_of(cls: type[N], attributes: dict[str, Any]) -> N:
    """An instance with these attributes, checked, without its constructor."""
    module = new_uninitialized(cls)
    attributes_now(module).update(attributes)
    update_moduledef(module)
    check_new(module)
    return module


# --- pickles -----------------------------------------------------------------------

# ``jax.nn.relu`` and ``jnp.tanh`` are wrapped objects that pickle cannot find under the module that
# they name. Users keep them in modules all the time, so a pickled module holds their public name
# instead. For a function that a call made, as ``opax.adam(1e-3)`` makes classes and schedules, it
# holds the call.

_PUBLIC = ("jax.nn", "jax.numpy", "jax.lax", "jax.scipy.special", "jax.random", "jax")
# Objects that pickle finds by name itself, or refuses with a good message.
_PLAIN = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class _Reduced:
    """Replaces a function: pickles as a call, and loads as the result of the call."""

    def __init__(self, reduced: tuple[Callable[..., Any], tuple[Any, ...]]):
        self.reduced = reduced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        find, where = self.reduced
        return find(*where)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def to_picklable(value: Any) -> Any:
    """Returns the value with picklable replacements for what pickle cannot find."""
    kind = type(value)
    if kind in READ_ONLY:
        return to_picklable(copy_containers(value))
    if kind is list or kind is tuple:
        return kind([to_picklable(x) for x in value])
    if kind is dict:
        return {key: to_picklable(x) for key, x in value.items()}
    if kind in KEYED:
        new = value.copy()  # with its default factory
        for key in new:
            new[key] = to_picklable(new[key])
        return new
    if kind is functools.partial:
        return functools.partial(to_picklable(value.func), *value.args, **value.keywords)
    if callable(value) and not isinstance(value, type):
        return _by_public_name(value)
    return value


def _by_public_name(function: Callable[..., Any]) -> Any:
    if isinstance(function, types.FunctionType):
        reduced = reduced_call(function)
        return function if reduced is None else _Reduced(reduced)
    name = getattr(function, "__name__", None)
    if isinstance(function, _PLAIN) or not isinstance(name, str):
        return function
    for module in _PUBLIC:
        if getattr(importlib.import_module(module), name, None) is function:
            return _Reduced((_find, (module, name)))
    return function


# Created object -> module and name of the function that created it, and its arguments.
_calls: weakref.WeakKeyDictionary[Any, tuple[str, str, tuple[Any, ...], dict[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


def remember_call(
    value: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Records that a class or function is the result of a call of ``function``."""
    _calls[value] = function.__module__, function.__name__, args, dict(kwargs)


def reduced_call(value: Callable[..., Any]) -> tuple[Any, ...] | None:
    """Returns how to pickle a class or function created by a call, or None."""
    if value not in _calls:
        return None
    module, name, args, kwargs = _calls[value]
    return _repeat_call, (module, name, to_picklable(args), to_picklable(kwargs))


def _repeat_call(module: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _find(module, name)(*args, **kwargs)


def restore(cls: type[N], names: tuple[str, ...], attributes: dict[str, Any]) -> N:
    """Makes a module of the names of its subtrees and of all attributes in order."""
    node = object.__new__(cls)
    attributes_now(node).update(attributes)
    subtrees = {n: _kind_of_subtree(attributes[n]) for n in names}
    update_moduledef(node, {n: subtrees.get(n, STATIC) for n in attributes})
    return node


def _kind_of_subtree(value: object) -> str:
    return MIXED if shows_static_leaves(value) or kind_of(value) is MIXED else ARRAYS


def _reduce_class(cls: type) -> Any:
    """Pickles a derived class as its recipe, a made one as the call, any other by name."""
    if recipe_of(cls):
        return from_recipe, (base_of(cls), recipe_of(cls), builders_of(cls))
    return reduced_call(cls) or cls.__qualname__


copyreg.pickle(ModuleMeta, _reduce_class)  # type: ignore[arg-type]
