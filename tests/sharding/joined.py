"""One of several processes that sum numbers together; how it ends is its last argument."""

import os
import signal
import sys
import time

import jax
import numpy as np

import pax_export as pax


def step(mesh, number):
    """A sum over all devices: waits for all processes."""
    own = np.full((jax.local_device_count(), 1), number, np.float32)
    whole = pax.sharding.shard_batch(own, mesh)
    return float(jax.jit(lambda x: x.sum())(whole))


def main(port, count, index, lost_after, end):
    with pax.sharding.processes(f"localhost:{port}", count, index, lost_after=lost_after):
        mesh = pax.sharding.make_mesh(data=jax.device_count())
        print(f"sum {step(mesh, index + 1):g}", flush=True)
        if end == "is late":
            time.sleep(1)
        if end == "raises":
            raise ValueError("the data\nis gone")
        if end == "exits":
            sys.exit(0)
        if end == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if end == "goes on":
            while True:
                step(mesh, 1)
    print("left", flush=True)


if __name__ == "__main__":  # pytest looks for doctests here
    main(*map(int, sys.argv[1:5]), sys.argv[5])
