"""A Transformer of 1, 7 and 70 billion parameters on 8 to 512 devices: counted, and compiled.

Nothing of that size is allocated: the model is abstract, and the compiler is asked
for programs for virtual devices, which are never run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import pax_export as pax
from benchmarks.counting import SCHEMES, Counted, count
from benchmarks.decoder import SIZES, Size, abstract, compiled_step

DEVICES = (8, 64, 512)
COMPILED = (8, 64)
QUICKLY = "--xla_backend_optimization_level=0"


def tables() -> Iterator[str]:
    """Sizes, then memory and traffic counted, then both as the compiler sees them."""
    yield _sizes()
    yield _counted(
        "Memory per device, counted (GiB): held between steps + needed in a step", _memory
    )
    yield _counted("Sent by each device in a step, counted (GiB)", _sent)
    yield from _compiled()


def _sizes() -> str:
    lines = [
        "### The model",
        "",
        "| | parameters | dim | layers | heads |",
        "|---|---|---|---|---|",
    ]
    for name, size in SIZES.items():
        net, _ = abstract(size)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(net)) / 1e9
        lines.append(
            f"| {name} | {parameters:.2f} · 10⁹ | {size.dim} | {size.layers} | {size.heads} |"
        )
    return "\n".join(lines) + "\n"


def _counted(title: str, cell: Any) -> str:
    head = " | ".join([f"{devices} devices" for devices in DEVICES])
    lines = [f"### {title}", "", f"| | | {head} |", "|---" * (2 + len(DEVICES)) + "|"]
    for size in SIZES:
        for scheme in SCHEMES:
            cells = [cell(count(SIZES[size], scheme, devices)) for devices in DEVICES]
            lines.append(f"| {size} | {scheme} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _memory(counted: Counted) -> str:
    return f"{_gib(counted.state)} + {_gib(counted.temporary)}"


def _sent(counted: Counted) -> str:
    return _gib(sum(counted.sent.values()))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}" if size < 100 * 2**30 else f"{size / 2**30:.0f}"


# --- compiled -----------------------------------------------------------------------------

_HEAD = (
    "model", "scheme", "devices", "state", "counted", "temporary", "counted",
    "sent", "counted", "to compile",
)  # fmt: skip


def _compiled() -> Iterator[str]:
    """The same by XLA's compiler for CPUs, in a process of its own with virtual devices."""
    lines = [
        "### On one device, as the compiler for CPUs reports it, beside what is counted (GiB)", "",
        f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|",
    ]  # fmt: skip
    for row in _rows_of_a_process():
        counted = count(SIZES[row["size"]], row["scheme"], row["devices"])
        cells = (
            row["size"], row["scheme"], str(row["devices"]),
            _gib(row["arguments"]), _gib(counted.state),
            _gib(row["temporary"]), _gib(counted.temporary),
            _gib(row["sent"]), _sent(counted), f"{row['seconds']:.0f} s",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines) + "\n"


def _rows_of_a_process() -> Iterator[dict[str, Any]]:
    """What `main` prints, while it prints it."""
    # Machine code of virtual devices is never run, so it is not optimized.
    flags = f"--xla_force_host_platform_device_count={max(COMPILED)} {QUICKLY}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.scaling"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    """Compiles sizes and schemes; prints a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--devices", nargs="+", type=int, default=COMPILED)
    parser.add_argument("--tpu", help="a topology such as v5p:4x4x4; needs libtpu, but no TPU")
    chosen = parser.parse_args()
    devices = _tpus(chosen.tpu) if chosen.tpu else jax.devices()
    for size, scheme, number in itertools.product(chosen.sizes, chosen.schemes, chosen.devices):
        row = compiled(SIZES[size], scheme, devices[:number])
        print(json.dumps({"size": size, **row}), flush=True)


def _tpus(topology: str) -> Sequence[Any]:
    """The chips of a TPU that is not there, to compile for."""
    from jax.experimental.topologies import get_topology_desc

    return get_topology_desc(topology_name=topology, platform="tpu").devices


def compiled(
    size: Size, scheme: str, devices: Sequence[Any], compute: str = "bf16"
) -> dict[str, Any]:
    """What the compiler says of a step on these devices: bytes, and how long it took."""
    rules, model = SCHEMES[scheme]
    mesh = pax.sharding.make_mesh(devices, data=-1, model=model)
    start = time.perf_counter()
    cost = pax.sharding.cost(compiled_step(size, mesh, rules, compute))
    by = {" ".join([kind, *axes]): sent for (kind, axes), sent in cost.sent_by(mesh).items()}
    return {
        "scheme": scheme, "devices": mesh.size, "arguments": cost.arguments,
        "temporary": cost.temporary, "sent": cost.sent, "sent by": by,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


if __name__ == "__main__":
    main()
