"""The examples run, and show what they promise.

With PAX_EXPORT_ARTIFACTS set, the digits model is left there, for
`consumers/test_served_digits.py` to serve in other versions of TensorFlow.
"""

from __future__ import annotations

import re

from pax_export.export.formats.onnx.web import browser, npm
from tests.consumers import artifacts
from tests.examples import EXAMPLES
from tests.processes import python

EPOCHS = 6  # of 30: enough to see that it learns, short enough for a test
#: Whether a page to draw on can be written and tried here.
WEB = npm.found() and browser.program() is not None


# One test: run in parallel, several would each run the example, in one directory.
def test_digits(tmp_path):
    output = (artifacts.root() or tmp_path) / "digits" / "model"
    output.parent.mkdir(parents=True, exist_ok=True)
    text = run_digits(output)
    learns(text)
    is_served_without_jax_and_agrees(text)
    leaves_an_export_and_a_picture(text, output)


def run_digits(output):
    """What `examples/digits.py` prints in a short run."""
    arguments = ["--epochs", EPOCHS, "--output", output, *["--web"] * WEB]
    return python(EXAMPLES / "digits.py", *arguments, cwd=None).stdout


def number(text, label):
    return float(re.search(rf"^{label}: ([0-9.e+-]+)", text, re.MULTILINE)[1])


def learns(text):
    losses = [float(loss) for loss in re.findall(r"^epoch +\d+: loss ([0-9.]+)", text, re.M)]
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0] / 4
    held_out = re.findall(r"^epoch.*, held out ([0-9.]+)%$", text, re.M)
    assert len(held_out) == EPOCHS
    assert abs(float(held_out[-1]) - number(text, "held-out accuracy")) < 0.1
    assert number(text, "held-out accuracy") >= 95


def is_served_without_jax_and_agrees(text):
    for size in (1, 7, 64):
        assert f"served 360 images in batches of {size}\n" in text
    assert "the served classes agree: True\n" in text
    found = re.search(r"^neighbors in float16 .*: ([0-9.e+-]+) apart$", text, re.M)
    # Each process rounds to float16 in places of its own: a few of its steps are the difference.
    assert 0 <= number(text, "largest difference of the logits") <= 8 * float(found[1])


def leaves_an_export_and_a_picture(text, output):
    assert "runs in     TensorFlow" in text
    assert (output / "saved_model.pb").is_file()
    assert (output / "pax_export.json").is_file()
    assert (output.with_name("web") / "index.html").is_file() is WEB
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_they_are_short_enough_to_be_read():
    most = {"digits.py": 140, "distributed.py": 170, "chat.py": 120, "finetune_lm.py": 120,
            "c/classify.c": 99, "c/chat.c": 125}  # fmt: skip
    lengths = {name: len((EXAMPLES / name).read_text("utf-8").splitlines()) for name in most}
    assert {name: length for name, length in lengths.items() if length > most[name]} == {}
