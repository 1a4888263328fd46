"""Measures how much memory exports of models on eight devices, and on disk, need.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    python -m tests.export.measure_deferred DIRECTORY MEBIBYTES

Prints the peak in MiB beyond what the process held before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export.checkpoint import Checkpoints
from pax_export.export import spec, to_saved_model
from tests.export.measure_memory import ROWS, mebibytes, model


def on_devices(size):
    by_row = NamedSharding(pax.sharding.make_mesh(data=8), P("data"))
    params, function = model(size, "jax")
    return jax.block_until_ready(jax.device_put(params, by_row)), function


def on_disk(folder, size):
    params, function = model(size, "jax")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(size, params=params)
    shapes = jax.eval_shape(lambda: params)
    return checkpoints.open().on_disk("params", shapes), function


def peak(path, given):
    before = mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    to_saved_model(given, path, spec(f"n, {ROWS}"), validate="variables", overwrite=True)
    return round(mebibytes("VmHWM") - before, 1)


def main(folder, size):
    peaks = {}
    for name, make in (
        ("devices", on_devices),
        ("disk", lambda size: on_disk(folder / "run", size)),
    ):
        peak(folder / "saved", make(1))
        peaks[name] = peak(folder / "saved", make(size))
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
