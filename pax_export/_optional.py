"""The one way to need an optional package: import it when used, name its extra."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.machinery import ModuleSpec
from types import ModuleType

from pax_export._errors import MissingPackageError


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional package, or says which extra of this distribution brings it.

    The purpose is what needs it, e.g. ``"to_saved_model"``.  A package that is
    installed but fails while importing raises its own error.

    Example:
        >>> require("json", "all", "this example").dumps({"a": 1})
        '{"a": 1}'
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise _missing(package, extra, purpose) from error


def find(package: str, extra: str, purpose: str) -> ModuleSpec:
    """Finds what `require` would import, without importing it.

    Example:
        >>> find("json", "all", "this example").name
        'json'
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise _missing(package, extra, purpose)
    return spec


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported.

    Example:
        >>> is_installed("json"), is_installed("no_such_package")
        (True, False)
    """
    return importlib.util.find_spec(package) is not None


def _missing(package: str, extra: str, purpose: str) -> MissingPackageError:
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed.",
        write=f'python -m pip install "pax-export[{extra}]"',
    )
