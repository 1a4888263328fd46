"""Loads opax over this package, as ``pax_export.opax``.

Its files get an ``__import__`` that returns this package for ``pax``, and a ``jnp`` whose clip has
the old keywords. Equal calls of ``opax.adam(1e-3)`` return one class, so that treedefs are equal
and optimizers can be pickled.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from pax_export import core
from pax_export._foundations.optional import find
from pax_export._foundations.types import ArrayLike, DTypeLike
from pax_export.core import is_array, remember_call, static_key
from pax_export.optim._optax import opax_contents


def load_opax(module: types.ModuleType) -> None:
    """Turns an empty module into opax; its files are executed in it and its submodules."""
    name = module.__name__
    installed = find("opax", "opax", name)
    if not any(isinstance(finder, _SubmoduleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SubmoduleFinder(name))
    folders = list(installed.submodule_search_locations or ())
    # A package has submodules, and names them with a dot.
    module.__path__ = folders
    module.__package__ = name
    if module.__spec__ is not None:
        module.__spec__.submodule_search_locations = folders
    _OpaxLoader(name, str(installed.origin)).exec_module(module)


class _SubmoduleFinder(MetaPathFinder):
    """Finds the submodules of opax under their names here."""

    def __init__(self, package: str):
        self.prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self.prefix):
            return None
        specs = [
            FileFinder(folder, (_OpaxLoader, SOURCE_SUFFIXES)).find_spec(fullname)
            for folder in path or ()
        ]
        return next((spec for spec in specs if spec is not None), None)


class _OpaxLoader(SourceFileLoader):
    """Executes a file of opax with its own ``__import__`` and ``jnp``."""

    def exec_module(self, module: types.ModuleType) -> None:
        names = vars(module)
        names["__builtins__"] = {**vars(builtins), "__import__": _import_opax}
        super().exec_module(module)
        if names.get("jnp") is jnp:
            names["jnp"] = _numpy
        if module.__name__.endswith(".transform"):
            names["GradientTransformation"]._pax_contents = opax_contents
        if module.__name__.endswith((".transform", ".schedule")):
            for name, value in list(names.items()):
                if _is_factory(value, module):
                    names[name] = _one_result_for_equal_calls(value)


def _import_opax(
    name: str,
    variables: Mapping[str, Any] | None = None,
    local: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    level: int = 0,
) -> types.ModuleType:
    if name == "pax":
        return core
    return builtins.__import__(name, variables, local, names, level)


class _Numpy(types.ModuleType):
    """`jax.numpy` as it was when opax was written."""

    @staticmethod
    def array(object: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
        """Not weakly typed: ``jnp.array(0.0)`` as a state would be, for one step."""
        array = jnp.array(object, dtype)
        return jnp.asarray(array, array.dtype)

    @staticmethod
    def clip(
        a: ArrayLike, a_min: ArrayLike | None = None, a_max: ArrayLike | None = None
    ) -> jax.Array:
        return jnp.clip(a, min=a_min, max=a_max)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


_numpy = _Numpy("jax.numpy")

P = ParamSpec("P")
R = TypeVar("R")


# --- one class for equal calls ----------------------------------------------------


def _is_factory(value: object, module: types.ModuleType) -> bool:
    """True for opax's public functions here: they make classes, or schedules."""
    return (
        isinstance(value, types.FunctionType)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    )


def _one_result_for_equal_calls(factory: Callable[P, R]) -> Callable[P, R]:
    known: dict[Any, Any] = {}
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if any(map(is_array, jax.tree_util.tree_leaves(bound.arguments))):
            # An array is not hashable by value, and must not be kept indefinitely.
            return remembered(factory(*args, **kwargs), args, kwargs)
        key = static_key(tuple(bound.arguments.values()))
        if key not in known:
            known[key] = remembered(factory(*args, **kwargs), args, kwargs)
        return known[key]

    def remembered(optimizer: R, args: tuple, kwargs: dict[str, Any]) -> R:
        remember_call(optimizer, factory, args, kwargs)  # type: ignore  # a class, or a schedule
        return optimizer

    return make
