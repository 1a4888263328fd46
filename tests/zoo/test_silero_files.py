"""One wheel with one net in five files, and with two others: each is what it is."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pax_export as pax
from examples.zoo.silero import SileroVAD, load
from pax_export.errors import AdoptionError
from tests.closeness import assert_close
from tests.zoo import wheels
from tests.zoo.collection import named

SILERO = named("silero-vad")

pytestmark = pytest.mark.skipif(
    wheels.wheel(*SILERO.wheel) is None,
    reason=f"no wheel of silero-vad where {wheels.FOLDER} says; see tox -e zoo",
)

# Beside the net for 16 kHz some have one for 8 kHz, and one has a state.
SAME = {
    "silero_vad_16k_sequence.onnx": (),  # gates of ONNX's LSTM
    "silero_vad.onnx": ("If_0_else_branch__*",),
    "silero_vad_op18_ifless.onnx": ("model_8k", "val_*"),
    "silero_vad_openvino_16k.onnx": (),
    "silero_vad.jit": ("_model_8k",),
}
OTHERS = ["silero_vad_16k.safetensors", "silero_vad_half.onnx"]


def data(file):
    return SILERO.folder / "silero_vad" / "data" / file


@pytest.fixture(scope="module")
def net():
    return load(SILERO.path)[0]


@pytest.mark.parametrize("file", SAME)
def test_other_files_have_the_same_net(net, file):
    same, _ = pax.weights.adopt(SileroVAD(), data(file), ignore=SAME[file] or None)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(net), jax.tree_util.tree_leaves(same.eval())
    ):
        assert_close(other, one, where=jax.tree_util.keystr(path))


@pytest.mark.parametrize("file", OTHERS)
def test_another_net_of_equal_shapes_is_told_apart_by_a_run(net, file):
    (sound,) = SILERO.export.inputs
    chances = SILERO.references["onnxruntime"](SILERO.folder)(sound)[0]
    other, _ = pax.weights.adopt(SileroVAD(), data(file))
    assert np.abs(other.eval()(sound) - chances).max() > 0.01
    with pytest.raises(AdoptionError, match="reference"):
        pax.weights.adopt(SileroVAD(), data(file), reference=(sound, chances))
    _, report = pax.weights.adopt(SileroVAD(), SILERO.path, reference=(sound, chances))
    assert report.tried >= 1
