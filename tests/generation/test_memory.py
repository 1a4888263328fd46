"""An export for a runtime of language models holds the net at most once more."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.hard.size import IN_LONG_RUNS
from tests.memory import measured, on_linux

#: What compiling and tracing take, whatever the size of the net.
FIXED = 24
#: How much of the net is held beyond it: a TFLite file is one buffer, others are written array
#: by array.
PARTS = {
    "gguf": 0.1, "transformers": 0.1, "genai": 0.1, "litertlm": 1.1,
    "gguf:8": 0.3, "genai:4": 0.6, "litertlm:8": 1.0, "litertlm:4": 0.5,
}  # fmt: skip
if not IN_LONG_RUNS:  # each format once, and each number of bits
    PARTS = {name: PARTS[name] for name in ("transformers", "gguf:8", "genai:4", "litertlm:4")}
#: The size of what is written: integers and their scales, and at most this much more.
SIZES, MORE = {"8": 0.266, "4": 0.141}, 0.006


@on_linux
def test_an_export_for_a_runtime_holds_no_more_of_a_net_than_it_must(tmp_path):
    missing = [name for name in ("tokenizers", "gguf", "onnx", "ai_edge_litert")
               if find_spec(name) is None]  # fmt: skip
    if missing:
        pytest.skip(f"not installed: {missing}")
    found = measured("tests.generation.measure_memory", tmp_path, 512, 5, *PARTS)
    size = found.pop("weights")
    peaks = {format: peak for format, (peak, *_) in found.items()}
    for format, (*_, share) in found.items():
        assert share < SIZES.get(format.partition(":")[2], 1) + MORE, format
    allowed = {format: part * size + FIXED for format, part in PARTS.items()}
    assert {format: peak for format, peak in peaks.items() if peak > allowed[format]} == {}
    assert set(peaks) == set(PARTS) and size > 80
