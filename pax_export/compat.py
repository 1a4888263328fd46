"""install_as_pax: an import hook that makes ``import pax`` and ``import opax`` this package."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pax_export._foundations.errors import MissingPackageError, NameTakenError, NotInPaxError
from pax_export._foundations.optional import install

# The modules that PAX offers.  Where they are here is found when they are asked for.
_OFFERED = ("pax", "pax.experimental", "pax.experimental.graph", "pax.nets", "pax.utils")
_PACKAGE = __name__.split(".")[0]

__all__ = ["install_as_pax"]


def install_as_pax() -> None:
    """Makes this package importable as ``pax``, and opax as ``opax``, in this process.

    Afterwards ``import pax``, ``from pax.experimental import graph`` or ``import opax.schedule``
    work in every file that is imported, pickles that name classes of ``pax`` can be loaded, and an
    installed ``pax`` is ignored. opax must be installed, and is loaded when a program first imports
    it.

    Call it before the first ``import pax``.  Calling it again does nothing.

    Raises:
        NameTakenError: (an ImportError) another ``pax`` or ``opax`` is imported
            already; its classes would be mixed with ours.

    Example:
        >>> import pax_export
        >>> pax_export.install_as_pax()
        >>> import pax
        >>> pax.Linear is pax_export.Linear
        True
    """
    if any(isinstance(finder, _PaxFinder) for finder in sys.meta_path):
        return
    for name in ("pax", "opax"):
        _require_free(name)
    sys.meta_path.insert(0, _PaxFinder())


def _require_free(name: str) -> None:
    """Raises if another package is imported under a name."""
    module = sys.modules.get(name)
    if module is None:
        # An import that failed leaves the submodules that it got through.
        for leftover in [key for key in sys.modules if key.startswith(name + ".")]:
            del sys.modules[leftover]
    elif module is not sys.modules.get(_own_name(name)):
        raise NameTakenError(
            f"install_as_pax was called too late: another package is already imported as {name!r}.",
            got=getattr(module, "__file__", None) or repr(module),
            write="pax_export.install_as_pax() before the first import of pax and opax",
        )


def _own_name(name: str) -> str:
    """The name of PAX's or opax's module in this package."""
    top, dot, rest = name.partition(".")
    return f"{_PACKAGE}.{name}" if top == "opax" else _PACKAGE + dot + rest


class _PaxFinder(MetaPathFinder, Loader):
    """Import hook for ``pax``, ``opax`` and their submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, _ = fullname.partition(".")
        if top == "opax":
            return ModuleSpec(fullname, self) if dot else self._find_opax()
        if top != "pax":
            return None
        if fullname in _OFFERED or (fullname + ".").startswith("pax._src."):
            return ModuleSpec(fullname, self)
        # Returning None would let another finder load our files a second time.
        raise NotInPaxError(
            f"No module named {fullname!r}: it is not part of PAX's interface.",
            write=f"one of {', '.join(_OFFERED)}; other rooms of this package as "
            f"{_PACKAGE}, e.g. import {_PACKAGE}.export",
            name=fullname,
        )

    def _find_opax(self) -> ModuleSpec:
        """The location of the installed opax; also used by `load_opax`."""
        for finder in sys.meta_path:
            if finder is not self:
                found = finder.find_spec("opax", None)
                if found is not None:
                    found.loader = self
                    return found
        raise MissingPackageError(
            "import opax needs the package 'opax', which is not installed.",
            write=f"{install('opax')} (the extra [opax] of pax-export)",
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # The import system would write on a module that is given here.
        spec.loader_state = _module_for(spec.name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # that of `create_module`
        sys.modules[module.__name__] = module.__spec__.loader_state


def _module_for(name: str) -> ModuleType:
    """Our module for a name that programs for PAX import."""
    if name.startswith("pax._src"):
        return internal_module(name)
    if name in _OFFERED:
        rest = name.split(".")[1:]
        return functools.reduce(getattr, rest, importlib.import_module(_PACKAGE))
    try:
        return importlib.import_module(_own_name(name))
    except ModuleNotFoundError as error:
        if error.name != _own_name(name):
            raise
        raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None


_ROOMS = ("", ".experimental", ".graph", ".nets", ".utils")
# Not part of PAX's interface, but parts of nets that are, and so in their pickles.
_PARTS = {
    "BlockGroup": ".nets._resnet",
    "ResNet": ".nets._resnet",
    "ResnetBlock": ".nets._resnet",
    "CausalSelfAttention": ".nets._transformer",
    "DenseBlock": ".nets._transformer",
}


class _Internals(ModuleType):
    """A module of PAX's sources, with the public names of PAX in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        for room in _ROOMS:
            module = importlib.import_module(_PACKAGE + room)
            if name in getattr(module, "__all__", ()):
                return getattr(module, name)
        if name in _PARTS:
            return getattr(importlib.import_module(_PACKAGE + _PARTS[name]), name)
        raise NotInPaxError(
            f"PAX's internal {self.__name__}.{name} does not exist here.",
            write="a public name of `pax`, which can be imported from any module of PAX",
            name=name,
        )


def internal_module(name: str) -> ModuleType:
    """Returns a stand-in for one file or folder of PAX's sources."""
    module = _Internals(name)
    module.__path__ = []  # so that names below it can be imported
    return module
