"""`examples/quantize_lm.py`, trained for a few steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "examples" / "quantize_lm.py"


def test_a_language_model_is_quantized_and_served(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    spec = importlib.util.spec_from_file_location("quantize_lm", PROGRAM)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--steps", "5", "--output", str(tmp_path)])
    example.main()
    lines = capsys.readouterr().out.splitlines()[-3:]
    rows = {name: list(map(float, rest)) for name, *rest in map(str.split, lines)}
    assert list(rows) == ["float32", "int8", "int4"]
    whole, few, fewer = (rows[name] for name in rows)
    for loss, served, *_ in rows.values():
        assert abs(loss - served) < 0.02 and abs(loss - whole[0]) < 0.1
    assert few[2] < fewer[2] and few[3] < 0.3 * whole[3] and fewer[3] < 0.2 * whole[3]
