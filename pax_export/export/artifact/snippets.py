"""Code snippets that call an export on zeros: Python and command line, with quoted names."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pax_export.export.artifact import dimensions
from pax_export.export.artifact.report import DEFAULT, ArrayInfo, Report, SignatureInfo
from pax_export.export.artifact.structure import Fixed, rebuild

#: A folder is called from inside it.
_HERE = "."
_TEXT = "string"
_OF_NUMPY = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    f"complex128 {_TEXT}".split()
)


def of(report: Report, name: str | None) -> Iterator[tuple[str, str]]:
    """The title and the text of each; ``name`` is that of a file, None for a folder."""
    path = name or _HERE
    for key, info in report.signatures.items():
        inputs = _inputs_text(info, _sizes(info))
        function = "model" if key == _first_key(report) else f"model.signatures[{key!r}]"
        arguments = ", ".join(_argument_codes(info))
        call = f"model = load({path!r})\noutput = {function}({arguments})\n"
        yield f"Python: {key}", _py_text(info, "from pax_export.export import load", inputs, call)
        if report.target in _RUNTIMES and all(map(_is_plain, (*info.inputs, *info.outputs))):
            runtime, line, call = _RUNTIMES[report.target]
            text = _py_text(info, line, inputs, call.format(path=path, key=key))
            yield f"Python, with {runtime} alone: {key}", text
        if report.target == "web" and (text := _javascript_text(key, info, report)):
            yield f"JavaScript: {key}", text
    yield "Command line", _command_lines(path, report)


def _first_key(report: Report) -> str | None:
    return DEFAULT if DEFAULT in report.signatures else next(iter(report.signatures), None)


def _sizes(info: SignatureInfo) -> dict[str, int]:
    """A size for each symbolic dimension that its constraints allow."""
    if info.sizes:
        return info.sizes[0]
    try:
        found = dimensions.choose([each.shape for each in info.inputs], info.constraints)
    except ValueError:  # an expression that a size makes meaningless
        return {}
    return found[0] if found else {}


def _shape_text(entry: ArrayInfo, sizes: Mapping[str, int]) -> str:
    """Formats the sizes; symbols if no valid sizes are known."""
    try:
        numbers = dimensions.shape(entry.shape, sizes)
    except ValueError:
        return repr(entry.shape)
    return repr(numbers)


# --- Python ---------------------------------------------------------------------------------


def _py_text(info: SignatureInfo, line: str, inputs: str, call: str) -> str:
    imports = [] if all(map(_is_plain, info.inputs)) else ["import ml_dtypes"]
    imports += ["import numpy as np", line]
    return "\n".join([*imports, "", inputs + call])


def _inputs_text(info: SignatureInfo, sizes: Mapping[str, int]) -> str:
    lines = ["inputs = {"]
    for each in info.inputs:
        symbolic = any(isinstance(size, str) for size in each.shape)
        shown = f"  # [{' '.join(', '.join(map(str, each.shape)).split())}]" if symbolic else ""
        array = _array_code(each, _shape_text(each, sizes))
        lines.append(f"    {each.name!r}: {array},{shown}")
    return "\n".join([*lines, "}", ""])


def _array_code(entry: ArrayInfo, shape: str) -> str:
    if entry.dtype == _TEXT:
        return f"np.full({shape}, 'some text', object)"
    named = _is_plain(entry) or not entry.dtype.isidentifier()
    dtype = repr(entry.dtype) if named else f"ml_dtypes.{entry.dtype}"
    return f"np.zeros({shape}, {dtype})"


def _is_plain(entry: ArrayInfo) -> bool:
    """Whether numpy itself has the dtype."""
    return entry.dtype in _OF_NUMPY


def _argument_codes(info: SignatureInfo) -> Iterator[str]:
    """The arguments of a call; those that were fixed are part of the function."""
    given = {name: tree for name, tree in info.arguments.items() if "static" not in tree}
    by_place = list(itertools.takewhile(given.__contains__, info.positional))
    yield from (_value(given.pop(name)) for name in by_place)
    for name, tree in given.items():
        yield f"{name}={_value(tree)}" if name.isidentifier() else f"**{{{name!r}: {_value(tree)}}}"


def _value(tree: Mapping[str, Any]) -> str:
    return _to_code(rebuild(tree, _InputName))


class _InputName(str):
    """The name of an input, instead of its array."""


def _to_code(value: object) -> str:
    if isinstance(value, _InputName):
        return f"inputs[{str(value)!r}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_to_code(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_to_code, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_to_code, value))}{',' if len(value) == 1 else ''})"
    return "None" if isinstance(value, Fixed) else repr(value)


_TENSORFLOW = """\
model = tf.saved_model.load({path!r})
tensors = {{name: tf.constant(value) for name, value in inputs.items()}}
outputs = model.signatures[{key!r}](**tensors)
"""
_LITERT = """\
model = Interpreter(model_path={path!r})
outputs = model.get_signature_runner({key!r})(**inputs)
"""
_ONNXRUNTIME = """\
model = onnxruntime.InferenceSession({path!r})
taken = {{entry.name: inputs[entry.name] for entry in model.get_inputs()}}
outputs = model.run(None, taken)
"""
#: Runtimes for each format without pax_export, and a call in each.
_RUNTIMES = {
    "saved_model": ("TensorFlow", "import tensorflow as tf", _TENSORFLOW),
    "tflite": ("LiteRT", "from ai_edge_litert.interpreter import Interpreter", _LITERT),
    "onnx": ("onnxruntime", "import onnxruntime", _ONNXRUNTIME),
}


# --- JavaScript -----------------------------------------------------------------------------


def javascript_name(key: str, keys: Iterable[str]) -> str:
    """The name of a signature in JavaScript.

    Example:
        >>> javascript_name("encode", ["encode"]), javascript_name("serving_default", [])
        ('encode', 'predict')
    """
    return "predict" if key == DEFAULT and "predict" not in keys else key


def _javascript_text(key: str, info: SignatureInfo, report: Report) -> str:
    """Returns a JavaScript call on zeros; empty if no valid sizes are known."""
    try:
        shapes = {each.name: dimensions.shape(each.shape, _sizes(info)) for each in info.inputs}
    except ValueError:
        return ""
    zeros = {
        name: f"data: Array({math.prod(shape)}).fill(0), shape: {list(shape)}"
        for name, shape in shapes.items()
    }
    inputs = "".join(f"  {json.dumps(name)}: {{{each}}},\n" for name, each in zeros.items())
    name = json.dumps(javascript_name(key, report.signatures))
    return (
        f'import {{model}} from "./model.js";\n\n'
        f"const outputs = await model[{name}]({{\n{inputs}}});\n"
    )


# --- the command line -----------------------------------------------------------------------


def _command_lines(path: str, report: Report) -> str:
    place = shlex.quote(path)
    lines = [f"pax-export inspect {place}", f"pax-export validate {place}"]
    for key, info in report.signatures.items():
        words = ["pax-export", "run", path]
        if key != _first_key(report):
            words += ["--signature", key]
        for number, each in enumerate(info.inputs):
            words += ["--input", f"{each.name}=input_{number}.npy"]
        lines.append(shlex.join([*words, "--output", "outputs.npz"]))
    return "\n".join(lines) + "\n"
