"""Measures how much memory an export needs beyond what the process held before.

python -m tests.export.measure_memory DIRECTORY MEBIBYTES

Prints the peak in MiB, for each way to validate.  Linux tells of it in /proc.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from pax_export.export import spec, to_saved_model

PARTS, ROWS = 4, 1024


def mebibytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def model(size):
    columns = size * 2**20 // 4 // PARTS // ROWS
    params = {f"w{part}": jnp.full((ROWS, columns), 0.01 * part) for part in range(PARTS)}
    return params, lambda p, x: {name: (x @ w).sum(axis=-1) for name, w in p.items()}


def peak(path, size, validate):
    given = jax.block_until_ready(model(size)[0]), model(1)[1]
    before = mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    to_saved_model(given, path, spec(f"n, {ROWS}"), validate=validate, overwrite=True)
    return mebibytes("VmHWM") - before


def main(folder, size):
    peaks = {}
    for validate in (False, True):
        to_saved_model(model(1), folder, spec(f"n, {ROWS}"), validate=validate, overwrite=True)
        peaks[str(validate)] = round(peak(folder, size, validate), 1)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
