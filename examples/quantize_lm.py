"""Trains a small language model on Python's own documentation, and quantizes it.

python examples/quantize_lm.py [--steps 300] [--output served/quantized_lm]

It needs no downloads: the texts are those of Python's `help`.  For float32, int8 and int4 the
table has the loss on texts that were not trained on, in jax and in onnxruntime, and the size of
the file.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig

LENGTH = 64
CONFIG = DecoderConfig.llama(
    vocab_size=128, dim=128, num_layers=2, num_heads=4, hidden_dim=256, tied=False
)


def texts():
    """The characters of the documentation, as numbers: those that are trained on, and the rest."""
    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = np.frombuffer(joined.encode("ascii", "replace"), np.uint8).astype(np.int32)
    rows = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return rows[:-64], rows[-64:]


def loss_of(logits, rows):
    """Nats for each character."""
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), rows[:, 1:])
    return losses.mean()


@jax.jit
def update(lm, optimizer, rows):
    """One step of Adam."""
    of = lambda params: loss_of(lm.update_parameters(params)(rows[:, :-1]), rows)  # noqa: E731
    return pax.optim.apply_gradients(lm, optimizer, jax.grad(of)(lm.parameters()))


def trained(rows, steps):
    """A model trained on `steps` batches."""
    pax.seed_rng_key(0)
    lm = Decoder(CONFIG, layers="listed")
    optimizer = pax.optim.from_optax(optax.adam(3e-3))(lm.parameters())
    random = np.random.default_rng(0)
    for _ in range(steps):
        lm, optimizer = update(lm, optimizer, rows[random.integers(len(rows), size=32)])
    return lm.eval()


def main():
    """Trains, quantizes, exports and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("served/quantized_lm"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    seen, held_out = texts()
    lm = trained(seen, options.steps)
    spec = pax.export.spec(f"batch, {LENGTH}", "int32")
    print(f"{'':10}{'loss':>8}{'in ONNX':>10}{'KL':>10}{'MiB':>8}")
    for name, bits in {"float32": None, "int8": 8, "int4": 4}.items():
        net, kl = lm, 0.0
        if bits:
            net, report = pax.quantize(lm, [held_out[:32, :-1]], bits=bits)
            kl = report.difference.kl
        file = options.output / f"{name}.onnx"
        write = partial(pax.export.to_onnx, overwrite=True, examples=[held_out[:1, :-1]])
        size = write(net, file, spec).graph_bytes / 2**20
        served = pax.export.load(file)
        losses = [loss_of(each(held_out[:, :-1]), held_out) for each in (jax.jit(net), served)]
        print(f"{name:10}{losses[0]:8.4f}{losses[1]:10.4f}{kl:10.2g}{size:8.2f}")


if __name__ == "__main__":
    main()
