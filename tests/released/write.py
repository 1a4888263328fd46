"""Writes files of every format with this version, for all later ones to read.

python -m tests.released.write
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import pax_export as pax

FOLDER = Path(__file__).parent
STEP = 7


def make_model() -> pax.Module:
    """A model with parameters and states."""
    return pax.Sequential(pax.Linear(3, 4), jax.nn.relu, pax.BatchNorm1D(4), pax.Linear(4, 2))


def trained() -> pax.Module:
    """The model with numbers that no initialiser gives."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: random.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype), make_model().eval()
    )


def write(folder: Path) -> None:
    """Writes the files of one version; the folder must not exist."""
    folder.mkdir(parents=True)
    model, spec = trained(), pax.export.spec("batch, length, 3")
    pax.export.to_saved_model(model, folder / "saved_model", spec, vjp_order=1)
    pax.export.to_stablehlo(model, folder / "bundle", spec, vjp_order=1)
    pax.export.to_tflite(model, folder / "model.tflite", spec)
    pax.save_weights(model, folder / "weights.safetensors")
    with pax.checkpoint.Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(STEP, model=model)
    for mark in folder.rglob("commit_success.txt"):  # its text names the folder of this machine
        mark.write_text("written\n", encoding="utf-8")
    x = np.linspace(-1, 1, 30, dtype=np.float32).reshape(2, 5, 3)
    gradient = jax.grad(lambda x: (model(x) ** 2).sum())(x)
    np.savez(folder / "numbers.npz", x=x, y=model(x), gradient=gradient)


if __name__ == "__main__":
    write(FOLDER / pax.__version__)
