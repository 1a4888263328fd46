"""Serve an exported model where there is no jax: TensorFlow and numpy are all.

python examples/serve_digits.py MODEL images.npy logits.npy
"""

import sys

for absent in ("jax", "jaxlib", "pax_export"):
    sys.modules[absent] = None  # from here on, importing it is an ImportError

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

model, asked, answered = sys.argv[1:]
serve = tf.saved_model.load(model).signatures["serving_default"]
images = np.load(asked)

answers = []
for size in (1, 7, 64):
    batches = [images[i : i + size] for i in range(0, len(images), size)]
    logits = [serve(images=tf.constant(batch))["output"] for batch in batches]
    answers.append(np.concatenate(logits))
    print(f"served {len(images)} images in batches of {size}")
np.save(answered, np.stack(answers))
