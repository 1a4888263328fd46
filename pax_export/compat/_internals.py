"""Aliases of PAX's own source files, for pickles.

A pickle that PAX wrote names a class by the file that defined it, such as
``pax._src.nn.recurrent.LSTMState``, and some programs import from there.  Under
any such name a module is found that knows the public classes and functions.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from pax_export._errors import NotInPaxError

_PACKAGE = __name__.split(".")[0]
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
            write="what `import pax` offers; public names can be imported from anywhere in PAX",
            name=name,
        )


def internals(name: str) -> ModuleType:
    """A stand-in for one file or folder of PAX's sources."""
    module = _Internals(name)
    module.__path__ = []  # so that names below it can be imported
    return module
