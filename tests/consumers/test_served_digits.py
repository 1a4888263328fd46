"""Serves the model of examples/digits.py where there is no jax.

Runs like `test_served.py`; `tests/test_examples.py` wrote what it serves:

    ROOT/.../digits/model       the SavedModel
    ROOT/.../digits/images.npy  the held-out images
    ROOT/.../digits/logits.npy  the logits that the example's own server gave
                                for them, in batches of 1, of 7 and of 64
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.closeness import assert_close
from tests.consumers import artifacts

ROOT = artifacts.served_root()
FOUND = sorted(path.parent for path in ROOT.rglob("digits/images.npy"))
TOLERANCE = 0.05  # of logits computed in float16

tf = importlib.import_module("tensorflow")


def test_there_is_a_digits_model():
    assert FOUND, f"{ROOT} holds no digits model: run tests/test_examples.py with it"


@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: folder.parent.name)
@pytest.mark.parametrize(("row", "batch"), [(0, 1), (1, 7), (2, 64)])
def test_classes_and_logits_agree(folder, row, batch):
    images, logits = np.load(folder / "images.npy"), np.load(folder / "logits.npy")[row]
    serve = tf.saved_model.load(str(folder / "model")).signatures["serving_default"]
    parts = [images[start : start + batch] for start in range(0, len(images), batch)]
    served = np.concatenate([serve(images=tf.constant(part))["output"] for part in parts])
    assert_close(served, logits, atol=TOLERANCE)
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    clear = first - second > 2 * TOLERANCE
    assert clear.mean() > 0.9
    assert (served.argmax(-1) == logits.argmax(-1))[clear].all()
