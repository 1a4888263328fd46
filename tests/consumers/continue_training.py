"""Goes on with training where there is no jax.

    python continue_training.py MODEL STEPS.npz [MODEL STEPS.npz ...]

MODEL is a SavedModel with a signature train_step; STEPS.npz holds images and
labels ``[step, batch, ...]``.  Prints a line for each: the losses, and what
comes of saving the state in a checkpoint and in another SavedModel on the way.
"""

from __future__ import annotations

import json
import sys
import tempfile

import numpy as np

for name in ("jax", "jaxlib", "pax_export"):
    sys.modules.setdefault(name, None)

import tensorflow as tf  # noqa: E402


def steps(model, images, labels):
    train = model.signatures["train_step"]
    return [
        float(train(images=tf.constant(x), labels=tf.constant(y))["loss"])
        for x, y in zip(images, labels)
    ]


def main(path, data):
    with np.load(data) as stored:
        images, labels = stored["images"], stored["labels"]
    half = len(images) // 2
    model = tf.saved_model.load(path)
    losses = steps(model, images[:half], labels[:half])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(model=model).write(folder + "/checkpoint")
        tf.saved_model.save(model, folder + "/again", signatures=dict(model.signatures))
        rest = steps(model, images[half:], labels[half:])
        restored = tf.saved_model.load(path)
        tf.train.Checkpoint(model=restored).read(checkpoint).assert_consumed()
        saved = tf.saved_model.load(folder + "/again")
        others = [steps(each, images[half:], labels[half:]) for each in (restored, saved)]
    logits = model.signatures["serving_default"](x=tf.constant(images[0]))["output"]
    print(
        json.dumps(
            {
                "losses": losses + rest,
                "after_checkpoint": others[0],
                "after_saving": others[1],
                "logits": logits.numpy().tolist(),
            }
        )
    )


if __name__ == "__main__":
    for given in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        main(*given)
