"""`examples/quantize_lm.py`, trained for a few steps."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from tests.examples import load_example


def test_a_language_model_is_quantized_and_served(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    example = load_example("quantize_lm")
    monkeypatch.setattr(sys, "argv", ["quantize_lm", "--steps", "5", "--output", str(tmp_path)])
    small = dataclasses.replace(example.CONFIG, num_layers=1)
    monkeypatch.setattr(example, "CONFIG", small)
    example.main()
    lines = capsys.readouterr().out.splitlines()[-3:]
    rows = {name: list(map(float, rest)) for name, *rest in map(str.split, lines)}
    assert list(rows) == ["float32", "int8", "int4"]
    whole, few, fewer = (rows[name] for name in rows)
    for loss, served, *_ in rows.values():
        assert abs(loss - served) < 0.02 and abs(loss - whole[0]) < 0.1
    assert few[2] < fewer[2] and few[3] < 0.3 * whole[3] and fewer[3] < 0.2 * whole[3]
