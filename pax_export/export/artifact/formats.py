"""The table of formats, for loading, validation, reports and the command line.

Other distributions add a `Format` by an entry point of the group ``pax_export.formats``.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

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
    others: str = ""

    @property
    def exporter(self) -> str:
        """The name of the function that writes it."""
        return self.export.partition(":")[2]


_ROOM = "pax_export.export.formats"
_CHECKS = "pax_export.export.artifact.checking"

_PLATFORMS = {
    "flag": "--platform",
    "action": "append",
    "choices": ("cpu", "cuda", "rocm", "tpu"),
    "help": "of savedmodel and stablehlo: a platform to lower for; default: all",
}
_ORDERS = {
    "type": int,
    "metavar": "N",
    "help": "of savedmodel and stablehlo: the order of derivatives",
}
SAVED_MODEL = Format(
    name="saved_model",
    title="a SavedModel",
    export=f"{_ROOM}.saved_model.export:to_saved_model",
    load=f"{_ROOM}.saved_model.load:load",
    run=f"{_ROOM}.saved_model.run:run",
    runtime=("tensorflow", "tensorflow"),
    check=f"{_CHECKS}:saved_model",
    option="savedmodel",
    options={
        "trainable": {
            "action": "store_const",
            "const": True,
            "help": "of savedmodel: make parameters trainable variables with gradients",
        },
        "platforms": _PLATFORMS,
        "consumer": {
            "metavar": '"tensorflow>=2.17"',
            "help": "of savedmodel: the oldest TensorFlow that must run it",
        },
        "vjp_order": _ORDERS,
    },
    loads_without_jax=True,
    has_variables=True,
    files=(
        "saved_model.pb",
        "fingerprint.pb",
        "keras_metadata.pb",
        "variables/checkpoint",
        "variables/variables.index",
        "variables/variables.data-*-of-*",
        "pax_export_retarget.json",
    ),
    plain_path=True,
)
STABLEHLO = Format(
    name="stablehlo",
    title="a StableHLO bundle",
    export=f"{_ROOM}.stablehlo.export:to_stablehlo",
    load=f"{_ROOM}.stablehlo.bundle:load",
    run=f"{_ROOM}.stablehlo.bundle:run",
    runtime=("jax", "stablehlo"),
    check=f"{_ROOM}.stablehlo.files:check",
    options={
        "weights": {"choices": ("arguments", "constants"), "help": "of stablehlo"},
        "platforms": _PLATFORMS,
        "vjp_order": _ORDERS,
    },
    run_imports=("jax", "pax_export"),
    files=("weights.safetensors", "*.jax_export", "*.mlirbc", "*.mlir"),
)
_LEVELS = {
    "type": int,
    "choices": (1, 4),
    "help": "of onnx and tflite: 1 for float32 products with quantized weights",
}
TFLITE = Format(
    name="tflite",
    title="a TFLite model",
    export=f"{_ROOM}.tflite.export:to_tflite",
    load=f"{_ROOM}.tflite.export:load",
    run=f"{_ROOM}.tflite.run:run",
    runtime=("ai_edge_litert", "tflite"),
    check=f"{_CHECKS}:check_file",
    suffix=".tflite",
    options={
        "quantize": {
            "choices": ("float16", "dynamic"),
            "help": "of tflite: weights with fewer bits",
        },
        "accuracy_level": _LEVELS,
    },
)
ONNX = Format(
    name="onnx",
    title="an ONNX model",
    export=f"{_ROOM}.onnx.export:to_onnx",
    load=f"{_ROOM}.onnx.export:load",
    run=f"{_ROOM}.onnx.run:run",
    runtime=("onnxruntime", "onnx"),
    others=f"{_ROOM}.onnx.runtimes",
    check=f"{_CHECKS}:check_file",
    suffix=".onnx",
    not_in_numpy=("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    options={
        "opset": {"type": int, "metavar": "N", "help": "of onnx: the version of its operators"},
        "accuracy_level": _LEVELS,
        "external_data": {
            "action": "store_const",
            "const": True,
            "help": "of onnx: write the weights to a separate file, as beyond 2 GiB",
        },
    },
)
WEB = Format(
    name="web",
    title="a folder for browsers",
    export=f"{_ROOM}.onnx.web.export:to_web",
    load=f"{_ROOM}.onnx.web.export:load",
    run=f"{_ROOM}.onnx.web.run:run",
    check=f"{_ROOM}.onnx.web.export:check",
    run_imports=("pax_export",),
    files=(
        *("*.onnx", "*.onnx.*.data", "*.js", "model.d.ts", "index.html", "page.css"),
        *("package.json", "onnxruntime-web/*"),
    ),
)
_FORMATS = (SAVED_MODEL, STABLEHLO, TFLITE, ONNX, WEB)


def find(name: str) -> Format | None:
    """Returns a format by name; None if no installed package provides it."""
    own = {each.name: each for each in _FORMATS}
    return own.get(name) or all_formats().get(name)


def all_formats() -> dict[str, Format]:
    """The rows by name; a name of ours is never another program's."""
    others = filter(None, map(_of_others, entry_points(group=GROUP)))
    return {each.name: each for each in (*others, *_FORMATS)}


def _of_others(entry: EntryPoint) -> Format | None:
    """The row of another distribution; if that is broken, our own formats still work."""
    try:
        return entry.load()
    except Exception as error:  # of code that is not ours
        text = f"The format {entry.name} ({entry.value}) cannot be used: {error!r}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None


def import_function(place: str) -> Any:
    """The function at ``"module:function"``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def exporters() -> str:
    """The functions that write our own formats, for messages."""
    *names, last = (each.exporter for each in _FORMATS)
    return f"{', '.join(names)} or {last}"
