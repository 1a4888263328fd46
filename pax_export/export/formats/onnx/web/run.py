"""Runs a browser folder in headless Chromium, with numpy and without jax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export.export.artifact.card import javascript_name
from pax_export.export.artifact.report import Report, read_report
from pax_export.export.formats.onnx.run_others import pack_array, unpack_array
from pax_export.export.formats.onnx.web import browser

Arrays = dict[str, np.ndarray]


def page_file(name: str) -> str:
    return Path(__file__).with_name("page").joinpath(name).read_text(encoding="utf-8")


def model_file(key: str, keys: Sequence[str]) -> str:
    """The name of the file of a signature.

    Example:
        >>> keys = ["encode", "Encode"]
        >>> [model_file(key, keys) for key in keys], model_file("encode", ["encode"])
        (['encode.onnx', 'model_1.onnx'], 'model.onnx')
    """
    if len(keys) == 1:
        return "model.onnx"
    plain = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z]+)*", key)  # and no model_1
    return f"{key}.onnx" if plain else f"model_{list(keys).index(key)}.onnx"


def run(path: str, cases: Iterable[Mapping[str, Any]]) -> list[Arrays]:
    """Returns the module's results in the browser, call by call."""
    report = read_report(path)
    with browser.opened(Path(path), page_file("answer.js")) as ask:
        return [_call(ask, report, case["signature"], case["inputs"]) for case in cases]


def _call(ask: browser.Ask, report: Report, key: str, inputs: Arrays) -> Arrays:
    given = {name: pack_array(value) for name, value in inputs.items()}
    found = ask({"key": javascript_name(key, report.signatures), "inputs": given})
    return {
        each.name: unpack_array(each.dtype, shape, text)
        for each in report.signatures[key].outputs
        for shape, text in [found[each.name]]
    }
