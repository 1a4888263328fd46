"""The C program of the examples, compiled against the TensorFlow of this environment."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from sklearn.datasets import load_digits

import pax_export as pax
from tests.closeness import assert_close
from tests.examples import EXAMPLES, load_example
from tests.hard.size import IN_LONG_RUNS

C = EXAMPLES / "c"
TOLERANCE = 0.02  # of logits computed in float16


def compiled(folder, name="classify"):
    """A program, built as its README says."""
    tf = Path(importlib.util.find_spec("tensorflow").submodule_search_locations[0])
    pattern = rf"^gcc ([^`]*?{name}\.c.*?2 -Wl,\S+)$"
    command = re.search(pattern, (C / "README.md").read_text(), re.M | re.S)[1]
    words = command.replace("\\\n", " ").replace('"', "").replace("$TF", str(tf)).split()
    words = [str(C / f"{name}.c") if word.endswith(".c") else word for word in words]
    words[words.index("-o") + 1] = str(folder / name)
    done = subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / name


def write_image(file, image, binary):
    head = f"{'P5' if binary else 'P2'}\n# a digit\n{image.shape[1]} {image.shape[0]}\n16\n"
    rows = "\n".join(" ".join(str(int(pixel)) for pixel in row) for row in image)
    file.write_bytes(
        head.encode() + (image.astype(np.uint8).tobytes() if binary else rows.encode())
    )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_c_program_classifies_as_jax_does(tmp_path):
    classify, net = compiled(tmp_path), load_example("digits").make_net()
    inputs = pax.export.spec("batch, 8, 8, 1", name="images")
    pax.export.to_saved_model(net, tmp_path / "model", inputs, validate=False)

    def run(*arguments):
        return subprocess.run([classify, *arguments], capture_output=True, text=True)

    images = load_digits().images[:2]
    expected = np.asarray(net.eval()(images[..., None].astype(np.float32) / 16))
    image, model, clear = tmp_path / "image.pgm", tmp_path / "model", 0
    for number, (digit, logits) in enumerate(zip(images, expected)):
        write_image(image, digit, binary=bool(number % 2))
        done = run(model, image)
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert_close([float(x) for x in first.split()], logits, atol=TOLERANCE)
        ordered = np.sort(logits)
        if ordered[-1] - ordered[-2] > 2 * TOLERANCE:
            clear += 1
            assert second == f"class {logits.argmax()}"
    assert clear

    image.write_bytes(b"P5 8 8 16\n123")
    done = run(model, image)
    assert (done.returncode, "the image is cut off" in done.stderr) == (1, True)
    if IN_LONG_RUNS:  # each loads TensorFlow
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


class _ByRows(pax.Module):
    """An LSTM over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = pax.LSTM(8, 16), pax.Linear(16, 10)

    def __call__(self, images):
        state = self.cell.initial_state(images.shape[0])
        _, rows = pax.scan(self.cell, state, images[..., 0], time_major=False)
        return self.head(rows[:, -1])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_c_program_runs_a_recurrent_graph(tmp_path):
    classify, net, model = compiled(tmp_path), _ByRows(), tmp_path / "model"
    inputs = pax.export.spec("batch, rows, 8, 1", name="images")
    pax.export.to_saved_model(net, model, inputs, operations="tensorflow", validate=False)
    image = load_digits().images[2]
    write_image(tmp_path / "image.pgm", image, binary=True)
    done = subprocess.run([classify, model, tmp_path / "image.pgm"], capture_output=True, text=True)
    logits = net(image[None, ..., None].astype(np.float32) / 16)[0]
    assert_close([float(x) for x in done.stdout.split("\n")[0].split()], logits, atol=2e-6)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_c_program_chats_as_jax_does(tmp_path):
    chat, model = compiled(tmp_path, "chat"), tmp_path / "model"
    pax.seed_rng_key(0)
    config = pax.nets.DecoderConfig.llama(
        vocab_size=40, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, tied=True
    )
    lm = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, pax.nets.Decoder(config))
    signatures = ["prefill", "decode"]
    pax.generation.export(lm, model, max_length=40, signatures=signatures, validate=False)
    turns, cache = [[3, 1, 4, 1, 5], [9, 2]], None
    expected = []
    for turn in turns:
        options = {"max_new_tokens": 6, "stop": 7, "max_length": 40, "return_cache": True}
        made = pax.generate(lm, [turn], cache=cache, **options)
        expected.append(made.tokens[0, : int(made.lengths[0])].tolist())
        cache = made.cache

    def run(*arguments, said=""):
        command = [chat, *map(str, arguments)]
        return subprocess.run(command, input=said, capture_output=True, text=True)

    said = "".join(f"{' '.join(map(str, turn))}\n" for turn in turns)
    done = run(model, 7, 6, said=said)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected
    # Nothing ends it but its number.  With the last of each answer, which the next turn reads, its
    # second turn takes 37 of the 40 tokens that have room; its third one fills it, and breaks off.
    longer = "".join(" ".join(["1"] * count) + "\n" for count in (29, 2))
    done = run(model, -1, 2, said=said.splitlines()[0] + "\n" + longer)
    assert list(map(int, done.stdout.split()))[:2] == expected[0][:2]
    assert (done.returncode, len(done.stdout.split())) == (1, 5)
    assert done.stderr.endswith(
        "chat: the cache is full: 40 tokens are in it and 1 come, where 40 have room; "
        "export with a larger max_length, or begin anew\n"
    )

    if IN_LONG_RUNS:  # each loads TensorFlow
        done = run(model, expected[0][1], 6, said=said.splitlines()[0] + "\n")
        assert list(map(int, done.stdout.split())) == expected[0][:2]
        assert run(model).returncode == run(model, 7, 0).returncode == 2
        done = run(model, 7, said="1 two\n")
        assert (done.returncode, "this is no token id" in done.stderr) == (1, True)
        done = run(tmp_path / "nowhere", 7)
        assert (done.returncode, "Could not find SavedModel" in done.stderr) == (1, True)
