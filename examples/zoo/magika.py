"""Magika, the kind of a file by its bytes: the net of magika 1.0.3 (Apache-2.0), an ONNX file.

    net, report = load("magika/models/standard_v3_3/model.onnx")
    net(samples)  # [batch, 2048] bytes -> [batch, 214], how likely each kind is

The samples are the first and the last 1024 bytes of a file without blanks at its ends; 256 stands
for bytes that a short file lacks.  Y. Fratantonio and others, ICSE 2025.
"""

import jax
import numpy as np

import pax_export as pax

SIDE, PADDING, KINDS = 1024, 256, 214

# Five arrays have 512 numbers each, and their names do not say what they are.
ROOT = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2"
NAMES = {
    f"{ROOT}/LayerNorm_*/Reshape_2:0": "norms.*.scale",
    f"{ROOT}/LayerNorm_*/Reshape_3:0": "norms.*.offset",
    "const_fold_opt__209": "conv.bias",
}


class Magika(pax.Module):
    """Bytes ``[batch, 2048]`` to how likely each kind of file is, ``[batch, 214]``."""

    def __init__(self):
        super().__init__()
        self.embed = pax.Linear(PADDING + 1, 64)
        self.norms = [pax.LayerNorm(512, eps=1e-6), pax.LayerNorm(512, eps=1e-6)]
        self.conv = pax.Conv1D(256, 512, 5, padding="VALID")
        self.head = pax.Linear(512, KINDS)

    def __call__(self, samples):
        x = jax.nn.gelu(self.embed(jax.nn.one_hot(samples, PADDING + 1)))
        x = x.reshape(x.shape[0], 512, 256)  # four bytes are one step
        x = self.norms[0](x.swapaxes(1, 2)).swapaxes(1, 2)  # each channel, over all steps
        x = jax.nn.gelu(self.conv(x)).max(axis=1)
        return jax.nn.softmax(self.head(self.norms[1](x)))


def load(path):
    """The trained net in eval mode, and the report of which array went where."""
    net, report = pax.weights.adopt(Magika(), path, rename=NAMES)
    return net.eval(), report


def sample(content: bytes) -> np.ndarray:
    """What the net sees of a file, ``[1, 2048]``."""
    begin = np.frombuffer(content[:4096].lstrip()[:SIDE], np.uint8)
    end = np.frombuffer(content[-4096:].rstrip()[-SIDE:], np.uint8)
    sample = np.full((1, 2 * SIDE), PADDING, np.int32)
    sample[0, : len(begin)] = begin
    sample[0, 2 * SIDE - len(end) :] = end
    return sample
