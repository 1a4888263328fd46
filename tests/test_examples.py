"""The examples run, and show what they promise.

With PAX_EXPORT_ARTIFACTS set, the digits model is left there, for
`consumers/test_served_digits.py` to serve in other versions of TensorFlow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.consumers import artifacts

ROOT = Path(__file__).parent.parent
EPOCHS = 6  # of 30: enough to see that it learns, short enough for a test


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """What `examples/digits.py` printed and wrote in a short run."""
    folder = artifacts.root() or tmp_path_factory.mktemp("example")
    output = folder / "digits" / "model"
    output.parent.mkdir(parents=True, exist_ok=True)
    program = ROOT / "examples" / "digits.py"
    command = [sys.executable, program, "--epochs", str(EPOCHS), "--output", output]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # of a checkout that is not installed
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, output


def number(text, label):
    return float(re.search(rf"^{label}: ([0-9.e+-]+)", text, re.MULTILINE)[1])


def test_digits_learns(digits):
    text, _ = digits
    losses = [float(loss) for loss in re.findall(r"^epoch +\d+: loss ([0-9.]+)", text, re.M)]
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0] / 4
    assert number(text, "held-out accuracy") >= 95


def test_digits_is_served_without_jax_and_agrees(digits):
    text, _ = digits
    for size in (1, 7, 64):
        assert f"served 360 images in batches of {size}\n" in text
    assert "the served classes agree: True\n" in text
    assert 0 <= number(text, "largest difference of the logits") < 0.05  # of a float16 net


def test_digits_leaves_an_export_and_a_picture(digits):
    text, output = digits
    assert "runs in     TensorFlow" in text
    assert (output / "saved_model.pb").is_file()
    assert (output / "pax_export.json").is_file()
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_digits_is_short_enough_to_be_read():
    lines = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
