"""The first net of a process: what building it takes, most of which is XLA's compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.compare import rows_of, table

_ROUNDS = 5
#: Ten layers of ten sizes with a norm behind each, as in nets whose layers grow.
_SIZES = "range(16, 176, 16)"
_CANDIDATES = {
    "pax_export": (
        "import pax_export as pax; Linear, LayerNorm = pax.Linear, pax.LayerNorm",
        "[(Linear(n, n + 16), LayerNorm(n + 16)) for n in {sizes}]",
    ),
    "equinox": (
        "import equinox.nn as nn; key = jax.random.key(0)",
        "[(nn.Linear(n, n + 16, key=key), nn.LayerNorm(n + 16)) for n in {sizes}]",
    ),
    "flax nnx": (
        "from flax import nnx; rngs = nnx.Rngs(0)",
        "[(nnx.Linear(n, n + 16, rngs=rngs), nnx.LayerNorm(n + 16, rngs=rngs)) for n in {sizes}]",
    ),
}
_PROGRAM = """
import time, jax
{imports}
begin = time.process_time()
net = {build}
jax.block_until_ready(jax.tree.leaves(net))
print(time.process_time() - begin)
"""


def tables() -> Iterator[str]:
    """Seconds of the processor, in a process for each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in _CANDIDATES}
    for _ in range(_ROUNDS):
        for name, (imports, build) in _CANDIDATES.items():
            program = _PROGRAM.format(imports=imports, build=build.format(sizes=_SIZES))
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            )
            seconds[name].append(float(done.stdout))
    title = "10 layers of 10 sizes, each with a norm, in seconds of the processor"
    yield table(title, rows_of(seconds))
