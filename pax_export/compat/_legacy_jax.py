"""Import hook through which one program sees removed JAX APIs (``--compat-jax``).

The program's modules get built-ins with their own `__import__`, which returns views of jax with
the old names. Other modules and `sys.modules` do not change.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pax_export._types import PyTree
from pax_export.compat._old_functions import find_object
from pax_export.compat._old_jax import OLD_MODULES, OLD_NAMES

_import = builtins.__import__


def _and_above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


# Modules with old names, or with submodules that have them.
_SEEN_OTHERWISE = {above for name in (*OLD_NAMES, *OLD_MODULES) for above in _and_above(name)}
_views: dict[str, ModuleType] = {}


class _View(ModuleType):
    """A module of jax with the removed names; removed modules have only these."""

    def __init__(self, name: str, real: ModuleType | None):
        super().__init__(name, getattr(real, "__doc__", None))
        vars(self)["_pax_real"] = real
        if real is not None and hasattr(real, "__path__"):
            vars(self)["__path__"] = real.__path__

    def __getattr__(self, name: str) -> Any:
        old, path = OLD_NAMES.get(self.__name__, {}).get(name), f"{self.__name__}.{name}"
        if old is not None:
            value = find_object(old.now) if isinstance(old.now, str) else old.now()
            vars(self)[name] = value
            return value
        if hasattr(self._pax_real, name):
            value = getattr(self._pax_real, name)
            return view_module(path) if isinstance(value, ModuleType) else value
        if path in _SEEN_OTHERWISE:
            return view_module(path)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__") or self._pax_real is None:
            super().__setattr__(name, value)
        else:
            setattr(self._pax_real, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._pax_real), *OLD_NAMES.get(self.__name__, ())})


def view_module(name: str) -> ModuleType:
    """Returns a view of a jax module with its old names, or the module if it has none."""
    if name not in _SEEN_OTHERWISE:
        return importlib.import_module(name)
    if name not in _views:
        if name in OLD_MODULES:
            _views[name] = view_module(OLD_MODULES[name])
        else:
            _views[name] = _View(name, _real_module(name))
    return _views[name]


def _real_module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None  # the module itself is gone, or one above it


def _import_as_seen(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`__import__` for the modules of a program."""
    if level or name.split(".")[0] != "jax":
        return _import(name, globals, locals, fromlist or (), level)
    if name not in _SEEN_OTHERWISE:
        _import(name, globals, locals, fromlist or (), level)
        return view_module(name) if fromlist else view_module("jax")
    for above in _and_above(name):
        view_module(above)
    if not fromlist:
        return view_module("jax")
    if _real_module(name) is not None:  # modules that are asked for by name are imported
        _import(name, globals, locals, [each for each in fromlist if each != "*"], level)
    return _with_all_names(view_module(name)) if "*" in fromlist else view_module(name)


def _with_all_names(seen: ModuleType) -> ModuleType:
    """A module with its public names in its dict, for ``from ... import *``."""
    module = ModuleType(seen.__name__)
    names = [name for name in dir(seen) if not name.startswith("_")]
    vars(module).update({name: getattr(seen, name) for name in names if hasattr(seen, name)})
    return module


#: The built-in names of a program's modules.
BUILTINS = {**vars(builtins), "__import__": _import_as_seen}


class _Loader(SourceFileLoader):
    """Loads a module of the program."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__builtins__"] = BUILTINS
        return module


class _ProgramFinder:
    """Finds the modules of the program, before anybody else does."""

    def __init__(self, folders: Sequence[str]):
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: PyTree = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not spec.origin:
            return None
        if not self._is_programs(Path(os.path.realpath(spec.origin))):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec

    def _is_programs(self, file: Path) -> bool:
        installed = {"site-packages", "dist-packages"} & set(file.parts)
        ours = Path(__file__).parent.parent in file.parents
        return not installed and not ours and any(each in file.parents for each in self._folders)


def show_old_jax(folder: str) -> None:
    """Provides the old jax to modules imported from a folder or PYTHONPATH."""
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    finder: Any = _ProgramFinder([folder, *others])
    sys.meta_path.insert(1, finder)  # behind that of `pax`
