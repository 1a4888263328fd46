"""Measures how much memory `adopt` needs beside the arrays that it places.

python -m tests.weights.adoption.measure_memory DIRECTORY

Prints, for each file and each form of the net, the peak in MiB beyond the placed arrays, on as
many devices as jax sees.  All of them are of this machine's memory, so that nothing is hidden.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import transforms as T
from tests.memory import peak

LAYERS, WIDTH, WIDE = 4, 1024, 2048  # 64 MiB of weights, 32 in each leaf of a Scan


class Block(pax.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = pax.Linear(WIDTH, WIDE), pax.Linear(WIDE, WIDTH)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x))), None


class Blocks(pax.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Block() for _ in range(LAYERS)]


def arrays():
    draw = np.random.default_rng(0)
    shapes = {"up": (WIDE, WIDTH), "down": (WIDTH, WIDE)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            at = f"layers.{layer}.{name}"
            yield f"{at}.weight", draw.standard_normal(shape, np.float32)
            yield f"{at}.bias", draw.standard_normal(shape[0], np.float32)


def write_safetensors(path):
    from safetensors.numpy import save_file

    save_file(dict(arrays()), path)


def write_npz(path):
    with path.open("wb") as file:
        np.savez(file, **dict(arrays()))


def extra(net, path, spec):
    """The peak beyond the arrays, and these: what they had must not be had again by others."""
    mesh = pax.sharding.make_mesh(model=-1)
    rules = {"**.weight": spec, "**": P()}
    found = {}
    with peak(found, "all"):
        new, _ = pax.weights.adopt(net, path, mesh=mesh, rules=rules, origin="torch")
    shards = [each.data.nbytes for leaf in jax.tree.leaves(new) for each in leaf.addressable_shards]
    return round(found["all"] - sum(shards) / 2**20, 1), new


def main(folder):
    forms = {
        "scan": (jax.eval_shape(lambda: T.Scan(Block, length=LAYERS)()), P(None, None, "model")),
        "list": (jax.eval_shape(Blocks), P("model")),
    }
    found, kept = {"devices": len(jax.devices())}, []
    for write in (write_safetensors, write_npz):
        write(folder / "net")
        for form, (net, spec) in forms.items():
            found[f"{form} {write.__name__}"], new = extra(net, folder / "net", spec)
            kept.append(new)
        (folder / "net").unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
