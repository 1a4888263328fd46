"""One of several processes that save and restore together.

python -m tests.checkpoint.in_processes PORT NUMBER COUNT DIRECTORY ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export.checkpoint import Checkpoints
from tests.checkpoint.on_meshes import RULES, make_state

DEVICES = 2


def main(port, number, count, *folders):
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number, initialization_timeout=120)
    mesh = pax.sharding.make_mesh(data=count, model=DEVICES)
    state = make_state()
    model = pax.sharding.shard(state["model"], mesh, RULES)
    follow = pax.sharding.following(model, RULES)
    optimizer = pax.sharding.shard(state["optimizer"], mesh, follow)
    trees = {"model": model, "optimizer": optimizer, "rng": state["rng"], "steps": state["steps"]}
    assert not model.weight.is_fully_addressable
    zeros = jax.tree_util.tree_map(jnp.zeros_like, model)
    for folder in folders:
        with Checkpoints(folder, keep=1, best="loss") as checkpoints:
            for step in range(3):
                checkpoints.save(step, metrics={"loss": step}, **trees)
        assert checkpoints.steps == (0, 2)
        restored = checkpoints.restore(model=zeros, optimizer=optimizer, rng=state["rng"])
        weight = restored["model"].weight
        assert weight.sharding == model.weight.sharding
        for mine, saved in zip(weight.addressable_shards, model.weight.addressable_shards):
            np.testing.assert_array_equal(mine.data, saved.data)
    print("process", number, "done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *map(Path, sys.argv[4:]))
