"""Measures the memory that an ONNX export with external data takes beyond its weights.

python -m tests.export.measure_external_data FILE LAYERS FEATURES

Prints MiB of the weights and of the peak beyond, without pages of files, and the seconds.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

from pax_export.export import spec, to_onnx
from tests.memory import peak


def main(path, layers, features):
    def apply(params, x):
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return x

    keys = jax.random.split(jax.random.key(0), layers)
    shape = (features, features)
    params = {f"w{n}": jax.random.normal(key, shape) / features**0.5 for n, key in enumerate(keys)}
    jax.block_until_ready(params)
    # What is loaded once, whatever the size.
    small = {}, lambda p, x: jnp.tanh(x @ jnp.ones((3, 3)))
    to_onnx(small, f"{path}.small.onnx", spec("b, 3"), overwrite=True)
    found = {}
    start = time.monotonic()
    with peak(found, "beyond", watched=True):
        report = to_onnx(
            (params, apply), path, spec(f"b, {features}"), external_data=True, overwrite=True
        )
    weights = layers * features**2 * 4 / 2**20
    found |= {"weights": weights, "validated": report.validated}
    print(json.dumps({**found, "seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
