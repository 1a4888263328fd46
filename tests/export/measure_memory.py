"""Measures how much memory an export needs beyond what the process held before.

python -m tests.export.measure_memory DIRECTORY MEBIBYTES KIND...

A kind is jax, numpy (the arrays of the model), closed (arrays of numpy that the
function closes over) or trainable.  Prints the peak in MiB, for each kind and each
way to validate.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pax_export.export import spec, to_saved_model
from tests.memory import peak

PARTS, ROWS = 4, 1024


def model(size, kind):
    columns = size * 2**20 // 4 // PARTS // ROWS
    full = np.full if kind in ("numpy", "closed") else jnp.full
    params = {f"w{part}": full((ROWS, columns), np.float32(0.01 * part)) for part in range(PARTS)}
    if kind == "closed":
        return {}, lambda p, x: apply(params, x)
    return params, apply


def apply(params, x):
    return {name: (x @ w).sum(axis=-1) for name, w in params.items()}


def export(given, path, kind, validate):
    options = {"trainable": kind == "trainable", "vjp_order": 1 if kind == "trainable" else 0}
    inputs = spec(f"n, {ROWS}")
    to_saved_model(given, path, inputs, validate=validate, overwrite=True, **options)


def main(folder, size, kinds):
    peaks = {}
    for kind in kinds:
        for validate in (False, True):
            export(model(1, kind), folder, kind, validate)
            given = model(size, kind)
            jax.block_until_ready(given[0])
            with peak(peaks, f"{kind} {validate}"):
                export(given, folder, kind, validate)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
