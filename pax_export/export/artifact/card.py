"""The HTML card of an export: one escaped, reproducible file without scripts or requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from pathlib import Path

from pax_export._files import html_text
from pax_export._files.side_files import CARD_MARK
from pax_export.export.artifact.report import SHA256, Report, VariableInfo
from pax_export.export.artifact.snippets import of

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
_BEGIN, _END = "<!-- drawing -->\n", "<!-- end of the drawing -->\n"
_OPEN, _CLOSE = '<div class="drawing">', "</div>\n"


def write_card(report: Report, place: Path, file: Path, drawing: str = "") -> None:
    """Writes the model card `file` for the export at `place`; `drawing` is an SVG of the model."""
    name = None if place.is_dir() else place.name
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
            f"<p>{escape(_about_place(report, name))}</p>\n",
            f"{without_time._repr_html_().replace(f'<b>{title}</b>', '', 1)}\n",
            f"<h2>How it was tested</h2>\n<p>{escape(_describe_test(report))}</p>\n",
            *_certified_lines(report),
            "<h2>Calls to copy</h2>\n",
            *(f"<h3>{escape(t)}</h3>\n<pre>{escape(s)}</pre>\n" for t, s in of(report, name)),
            f"<h2>Drawing</h2>\n{_BEGIN}{_OPEN}{drawing}{_CLOSE}{_END}" if drawing else "",
            *_array_table(report.variables),
            "</body></html>\n",
        ]
    )


def drawing_in(card: str) -> str:
    """Returns the drawing in the text of a card, or ""."""
    _, _, after = card.partition(_BEGIN)
    drawing, end, _ = after.partition(_END)
    return drawing.removeprefix(_OPEN).removesuffix(_CLOSE) if end else ""


def _about_place(report: Report, name: str | None) -> str:
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
    table = html_text.grid(("name", "array", "", "leaves of the model"), rows)
    rest = f"<p>and {more} more</p>" if more else ""
    yield f"<h2>Stored arrays</h2>\n<details><summary>{len(variables)} arrays</summary>"
    yield f'<div class="pax-report">{table}</div>{rest}</details>\n'
