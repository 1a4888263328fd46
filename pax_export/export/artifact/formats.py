"""The table of formats, for loading, validation, reports and the command line.

The ``__init__.py`` of each folder in ``formats`` has the rows of the format; other distributions
add a `Format` by an entry point of the group ``pax_export.formats``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

#: The file of a SavedModel with requests that TensorFlow Serving answers at the start.
WARMUP_REQUESTS = "assets.extra/tf_serving_warmup_requests"

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: Options of several formats, as `argparse` has them.
PLATFORM_OPTION: Mapping[str, Any] = {
    "flag": "--platform",
    "action": "append",
    "choices": PLATFORMS,
    "help": "of savedmodel and stablehlo: a platform to lower for; default: all",
}
ORDER_OPTION: Mapping[str, Any] = {
    "type": int,
    "metavar": "N",
    "help": "of savedmodel and stablehlo: the order of derivatives",
}
LEVEL_OPTION: Mapping[str, Any] = {
    "type": int,
    "choices": (1, 4),
    "help": "of onnx and tflite: 1 for float32 products with quantized weights",
}

GROUP = "pax_export.formats"


@dataclass(frozen=True)
class Format:
    """One format: its name, and its functions as ``"module:function"``, imported when used.

    Attributes:
        name: the name in reports, e.g. ``"tflite"``.
        title: the name in messages, e.g. ``"a TFLite model"``.
        export: the writer: ``(model, path, inputs, *, kwargs, methods, validate, overwrite, ...)``.
        load: the loader: ``(path, report)`` returns a callable.
        run: runs calls with the runtime only: ``(path, calls)`` returns a dict of outputs by name
            for each.  A call is a dict with its ``"signature"`` and ``"inputs"`` by name.
        check: ``(path, report, trusted)`` raises for corrupted and untrusted exports, before
            `load` and `run`.
        suffix: the suffix of the file name; empty for a folder.
        option: the name for ``--target``, if it differs.
        options: its own options of ``pax-export export``: the argument of the writer, and
            arguments of ``add_argument`` of `argparse`, with ``"flag"`` if it is called otherwise.
        loads_without_jax: whether `load` works without jax.
        run_imports: which of ``"jax"`` and ``"pax_export"`` `run` may import.
        has_variables: whether ``validate="variables"`` is supported.
        files: patterns of the files in its folder, except the report; other folders are never
            replaced.
        plain_path: whether its loader treats ``*``, ``?`` and ``[`` in paths as patterns.
        not_in_numpy: dtypes that its runtime does not exchange as numpy arrays; `load` does.
        runtime: the package that `run` needs, and the extra that installs it.
        snippet: a call on the card with the runtime alone: its name, a line that imports it, and
            the call of `inputs`, numpy arrays by name, with ``{path!r}`` and ``{key!r}``.
        javascript: a function that writes such a call: of the key of a signature, the keys of all,
            and the shapes of its inputs by name.
        others: a module that runs its calls in other runtimes: ``NAMES``, ``check(names,
            purpose)``, ``version(name)`` and ``run(name, path, calls, seconds)``.

    Example:
        >>> from pax_export.export.formats import Format
        >>> row = Format("toy", "a toy", "toy:to_toy", "toy:load", "toy:run", suffix=".toy")
        >>> row.exporter
        'to_toy'
    """

    name: str
    title: str
    export: str
    load: str
    run: str
    check: str = ""
    suffix: str = ""
    option: str = ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loads_without_jax: bool = False
    run_imports: tuple[str, ...] = ()
    has_variables: bool = False
    files: tuple[str, ...] = ()
    plain_path: bool = False
    not_in_numpy: tuple[str, ...] = ()
    runtime: tuple[str, str] = ("", "")
    snippet: tuple[str, str, str] | None = None
    javascript: str = ""
    others: str = ""

    @property
    def exporter(self) -> str:
        """The name of the function that writes it."""
        return self.export.partition(":")[2]


def find(name: str) -> Format | None:
    """Returns a format by name; None if no installed package provides it."""
    return own_formats().get(name) or all_formats().get(name)


@functools.cache
def own_formats() -> dict[str, Format]:
    """The rows of this library by name."""
    room = importlib.import_module("pax_export.export.formats")
    folders = [each.name for each in pkgutil.iter_modules(room.__path__) if each.ispkg]
    modules = (importlib.import_module(f"{room.__name__}.{name}") for name in folders)
    found = (each for module in modules for each in vars(module).values())
    return {each.name: each for each in found if isinstance(each, Format)}


def all_formats() -> dict[str, Format]:
    """The rows by name; a name of ours is never another program's."""
    others = filter(None, map(_of_others, entry_points(group=GROUP)))
    return {each.name: each for each in others} | own_formats()


def _of_others(entry: EntryPoint) -> Format | None:
    """The row of another distribution; if that is broken, our own formats still work."""
    try:
        return entry.load()
    except Exception as error:  # of code that is not ours
        text = f"The format {entry.name} ({entry.value}) cannot be used: {error!r}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None


def import_function(reference: str) -> Any:
    """The function at ``"module:function"``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def exporters() -> str:
    """The functions that write our own formats, for messages."""
    *names, last = (each.exporter for each in own_formats().values())
    return f"{', '.join(names)} or {last}"
