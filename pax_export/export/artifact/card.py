"""The HTML card of an export: one escaped, reproducible file without scripts or requests."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from pax_export._foundations import tables
from pax_export._foundations.files.own_files import CARD_MARK
from pax_export.export.artifact import dimensions
from pax_export.export.artifact.formats import find, import_function
from pax_export.export.artifact.report import (
    DEFAULT,
    SHA256,
    ArrayInfo,
    Report,
    SignatureInfo,
    VariableInfo,
)
from pax_export.export.artifact.structure import Fixed, rebuild

#: The number of arrays listed on the card; the report has all.
_MOST_ARRAYS = 500
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff; }
h1 { font-size: 1.6em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 1.8em; }
h3 { font-size: 1em; margin: 1em 0 .2em; } p { margin: .4em 0; }
pre { font: 12px/1.5 ui-monospace, monospace; background: #f4f5f8; padding: .8em 1em;
  overflow-x: auto; user-select: all; } summary { cursor: pointer; }
.drawing { overflow-x: auto; }
"""
#: These enclose the drawing, which no report has.
_BEGIN = '<!-- drawing -->\n<div class="drawing">'
_END = "</div>\n<!-- end of the drawing -->\n"


def write_card(report: Report, path: Path, file: Path, drawing: str = "") -> None:
    """Writes the model card `file` for the export at `path`; `drawing` is an SVG of the model."""
    name = None if path.is_dir() else path.name
    # Half of a surrogate pair, which a name may have, is no text.
    file.write_bytes(page(report, name, drawing).encode("utf-8", "backslashreplace"))


def page(report: Report, name: str | None, drawing: str = "") -> str:
    """The card as text; ``name`` is that of a file, None for a folder."""
    without_time = dataclasses.replace(report, seconds={})
    title = escape(str(without_time).splitlines()[0])
    return "".join(
        [
            f'<!doctype html>\n{CARD_MARK}\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n",
            f"<p>{escape(_about(report, name))}</p>\n",
            f"{without_time._repr_html_().replace(f'<b>{title}</b>', '', 1)}\n",
            f"<h2>How it was tested</h2>\n<p>{escape(_describe_test(report))}</p>\n",
            *_certified_lines(report),
            "<h2>Calls to copy</h2>\n",
            *(f"<h3>{escape(t)}</h3>\n<pre>{escape(s)}</pre>\n" for t, s in snippets(report, name)),
            f"<h2>Drawing</h2>\n{_BEGIN}{drawing}{_END}" if drawing else "",
            *_array_table(report.variables),
            "</body></html>\n",
        ]
    )


def drawing_in(card: str) -> str:
    """Returns the drawing in the text of a card, or ""."""
    _, _, after = card.partition(_BEGIN)
    drawing, end, _ = after.partition(_END)
    return drawing if end else ""


def _about(report: Report, name: str | None) -> str:
    if name is None:
        return "This page and the export lie in one folder; pax_export.json has the same as data."
    digest = report.details.get(SHA256)
    of = f" The model in it, without its report, has the SHA-256 {digest}." if digest else ""
    return f"This page lies beside {name}, which holds the same as data.{of}"


def _describe_test(report: Report) -> str:
    if report.validated is None:
        return f"It was not: {'; '.join(report.left_out) or 'validate=False'}."
    if report.validated == "variables":
        return "The stored arrays were compared with those of the model; no calls were made."
    where = {
        "here": "It was loaded in the process that wrote it",
        "process": "It was loaded in a fresh process without jax",
    }[report.validated]
    text = f"{where}, called at several sizes, and compared with jax."
    if report.untested:
        text += f" No call of {', '.join(report.untested)} was found that gives an element to "
        text += "compare."
    if report.largest_error:
        largest = max(report.largest_error.values())
        text += f" The largest difference of any output was {largest:.1e}; those of each stand "
        text += "beside the outputs."
    if report.tested_in:
        found = ", ".join(f"{name} ({error})" for name, error in report.tested_in.items())
        text += (
            f" The same was done in other runtimes, with the largest difference of each: {found}."
        )
    if report.left_out:
        text += " Some calls were left out, because they would have taken longer than the export."
    return text


def _certified_lines(report: Report) -> Iterator[str]:
    if report.certified:
        lines = "".join(f"<li>{escape(text)}</li>" for text in report.certified)
        yield f"<p>Certified later, by <code>pax-export certify</code>:</p>\n<ul>{lines}</ul>\n"


def _array_table(variables: tuple[VariableInfo, ...]) -> Iterator[str]:
    if not variables:
        return
    rows = [
        (
            each.name,
            f"{each.dtype}[{', '.join(map(str, each.shape))}]",
            "trainable" if each.trainable else "parameter" if each.parameter else "",
            ", ".join(each.leaves),
        )
        for each in variables[:_MOST_ARRAYS]
    ]
    more = len(variables) - len(rows)
    table = tables.grid(("name", "array", "", "leaves of the model"), rows)
    rest = f"<p>and {more} more</p>" if more else ""
    yield f"<h2>Stored arrays</h2>\n<details><summary>{len(variables)} arrays</summary>"
    yield f'<div class="pax-report">{table}</div>{rest}</details>\n'


# --- Code snippets that call an export on zeros: Python and command line, with quoted names ------

_TEXT = "string"
_OF_NUMPY = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    f"complex128 {_TEXT}".split()
)


def snippets(report: Report, name: str | None) -> Iterator[tuple[str, str]]:
    """The title and the text of each; ``name`` is that of a file, None for a folder."""
    path, format = name or ".", find(report.target)  # a folder is called from inside it
    first = DEFAULT if DEFAULT in report.signatures else next(iter(report.signatures), None)
    for key, info in report.signatures.items():
        sizes = _sizes(info)
        inputs = _inputs_text(info, sizes)
        function = "model" if key == first else f"model.signatures[{key!r}]"
        arguments = ", ".join(_argument_codes(info))
        call = f"model = load({path!r})\noutput = {function}({arguments})\n"
        yield f"Python: {key}", _py_text(info, "from pax_export.export import load", inputs, call)
        if format and format.snippet and all(map(_is_plain, (*info.inputs, *info.outputs))):
            runtime, line, call = format.snippet
            text = _py_text(info, line, inputs, call.format(path=path, key=key))
            yield f"Python, with {runtime} alone: {key}", text
        if format and format.javascript:
            with suppress(ValueError):  # no valid sizes are known
                shapes = {each.name: dimensions.shape(each.shape, sizes) for each in info.inputs}
                text = import_function(format.javascript)(key, report.signatures, shapes)
                yield f"JavaScript: {key}", text
    yield "Command line", _command_lines(path, report, first)


def _sizes(info: SignatureInfo) -> dict[str, int]:
    """A size for each symbolic dimension that its constraints allow."""
    if info.sizes:
        return info.sizes[0]
    try:
        found = dimensions.choose([each.shape for each in info.inputs], info.constraints)
    except ValueError:  # an expression that a size makes meaningless
        return {}
    return found[0] if found else {}


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
        try:
            shape = dimensions.shape(each.shape, sizes)
        except ValueError:  # no valid sizes are known
            shape = each.shape
        lines.append(f"    {each.name!r}: {_array_code(each, shape)},{shown}")
    return "\n".join([*lines, "}", ""])


def _array_code(entry: ArrayInfo, shape: tuple[int | str, ...]) -> str:
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
    arguments = {name: tree for name, tree in info.arguments.items() if "static" not in tree}
    positional = list(itertools.takewhile(arguments.__contains__, info.positional))
    yield from (_value(arguments.pop(name)) for name in positional)
    for name, tree in arguments.items():
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


# --- the command line -----------------------------------------------------------------------


def _command_lines(path: str, report: Report, first: str | None) -> str:
    quoted = shlex.quote(path)
    lines = [f"pax-export inspect {quoted}", f"pax-export validate {quoted}"]
    for key, info in report.signatures.items():
        words = ["pax-export", "run", path]
        if key != first:
            words += ["--signature", key]
        for number, each in enumerate(info.inputs):
            words += ["--input", f"{each.name}=input_{number}.npy"]
        lines.append(shlex.join([*words, "--output", "outputs.npz"]))
    return "\n".join(lines) + "\n"
