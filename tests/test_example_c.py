"""The C program of the examples, compiled against the TensorFlow of this environment."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import pax_export as pax
from tests.closeness import assert_close

C = Path(__file__).parent.parent / "examples" / "c"
TOLERANCE = 0.02  # of logits computed in float16


def compiled(folder):
    """The program, built as its README says."""
    tf = Path(importlib.util.find_spec("tensorflow").submodule_search_locations[0])
    command = re.search(r"^gcc (.*?)\n```", (C / "README.md").read_text(), re.M | re.S)[1]
    words = command.replace("\\\n", " ").replace('"', "").replace("$TF", str(tf)).split()
    words = [str(C / "classify.c") if word.endswith(".c") else word for word in words]
    words[words.index("-o") + 1] = str(folder / "classify")
    done = subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "classify"


def write_image(file, image, binary):
    head = f"{'P5' if binary else 'P2'}\n# a digit\n{image.shape[1]} {image.shape[0]}\n16\n"
    rows = "\n".join(" ".join(str(int(pixel)) for pixel in row) for row in image)
    file.write_bytes(
        head.encode() + (image.astype(np.uint8).tobytes() if binary else rows.encode())
    )


def digits_net():
    spec = importlib.util.spec_from_file_location("digits", C.parent / "digits.py")
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    return digits.make_net()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_c_program_classifies_as_jax_does(tmp_path):
    classify, net = compiled(tmp_path), digits_net()
    inputs = pax.export.spec("batch, 8, 8, 1", name="images")
    pax.export.to_saved_model(net, tmp_path / "model", inputs, validate=False)

    def run(*arguments):
        return subprocess.run([classify, *arguments], capture_output=True, text=True)

    images = load_digits().images[:4]
    expected = np.asarray(net.eval()(images[..., None].astype(np.float32) / 16))
    clear = 0
    for number, (image, logits) in enumerate(zip(images, expected)):
        write_image(tmp_path / "image.pgm", image, binary=bool(number % 2))
        done = run(tmp_path / "model", tmp_path / "image.pgm")
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert_close([float(x) for x in first.split()], logits, atol=TOLERANCE)
        ordered = np.sort(logits)
        if ordered[-1] - ordered[-2] > 2 * TOLERANCE:
            clear += 1
            assert second == f"class {logits.argmax()}"
    assert clear >= 2

    image, model = tmp_path / "image.pgm", tmp_path / "model"
    assert run(model).returncode == 2
    for arguments, message in (
        ((tmp_path / "nowhere", image), "Could not find SavedModel"),
        ((model, tmp_path / "nowhere"), "cannot be opened"),
        ((model, C / "classify.c"), "this is no PGM image"),
        ((model, image, "x", "y"), "x: the model has no such operation"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert message in done.stderr
    image.write_bytes(b"P5 8 8 16\n123")
    done = run(model, image)
    assert (done.returncode, "the image is cut off" in done.stderr) == (1, True)


def test_it_is_short_enough_to_be_read():
    assert len((C / "classify.c").read_text().splitlines()) < 100
