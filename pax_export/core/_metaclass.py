"""The metaclass of modules: creation of classes and instances."""

from __future__ import annotations

import abc
import copyreg
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pax_export.core._call_paths import noting_path
from pax_export.core._check import check_new
from pax_export.core._parameters import respecting_frozen
from pax_export.core._pickling import reduced_call
from pax_export.core._scopes import open_modules
from pax_export.core._subclassing import base_of, builders_of, from_recipe, recipe_of
from pax_export.core._tree import Node, attributes_now, fill_node, register_class, update_moduledef

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


def _reduce_class(cls: type) -> Any:
    """Pickles a derived class as its recipe, a made one as the call, any other by name."""
    if recipe_of(cls):
        return from_recipe, (base_of(cls), recipe_of(cls), builders_of(cls))
    return reduced_call(cls) or cls.__qualname__


copyreg.pickle(ModuleMeta, _reduce_class)  # type: ignore[arg-type]


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
