"""Imports optional packages on use; the error names the packages of the extra in ``setup.cfg``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType

from pax_export._foundations.errors import MissingPackageError


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional package for a `purpose`; an error says how to install its extra.

    Example:
        >>> require("json", "all", "this example").dumps({"a": 1})
        '{"a": 1}'
    """
    try:
        if package.split(".")[0] == "tensorflow":  # whose import tells of CPUs and GPUs otherwise
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        if package.split(".")[0] == "torch" and "tensorflow" in sys.modules:
            # The LLVM of Triton ends a process that has loaded the LLVM of TensorFlow.
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise _missing_package(package, extra, purpose) from error


def find(package: str, extra: str, purpose: str) -> ModuleSpec:
    """Finds an optional package, without importing it."""
    if spec := _spec_of(package):
        return spec
    raise _missing_package(package, extra, purpose)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return _spec_of(package) is not None


def _spec_of(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ImportError:  # whoever looks for modules here does not let it be imported
        return None


def _missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which is not installed.",
        write=f"{install(extra)} (the extra [{extra}] of pax-export)"
        if extra != "all"
        else install(extra),
    )


def install(extra: str) -> str:
    """The command that installs the packages of an extra.

    Example:
        >>> install("stablehlo")
        'python -m pip install "safetensors>=0.7" "zlib-ng>=0.5" "flatbuffers>=24.3.25"'
    """
    return " ".join(("python -m pip install", *(f'"{each}"' for each in packages_of(extra))))


def packages_of(extra: str) -> list[str]:
    """The packages of an extra, those of the extras that it names included; pip knows them.

    Under "all" they are those that every installation has.
    """
    try:
        lines = metadata.requires("pax-export") or []
    except metadata.PackageNotFoundError:  # the sources alone, on Python's path
        return [f"pax-export[{extra}]"]
    found: list[str] = []
    for requirement, _, condition in (line.partition("; ") for line in lines):
        if condition != ("" if extra == "all" else f'extra == "{extra}"'):
            continue
        others = re.fullmatch(r"pax-export\[(.*)\]", requirement)
        of_others = others[1].split(",") if others else []
        found += [each for other in of_others for each in packages_of(other)] or [requirement]
    return found
