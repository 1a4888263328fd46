"""Checkpoints between meshes of eight devices.

export XLA_FLAGS=--xla_force_host_platform_device_count=8
python -m tests.checkpoint.on_meshes DIRECTORY
"""

from __future__ import annotations

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import sharding
from pax_export.checkpoint import Checkpoints
from tests.refusals import refused

RULES = {"weight": P("data", "model"), "bias": P("model")}


def mesh_of(data, model):
    return sharding.make_mesh(data=data, model=model, devices=jax.devices()[: data * model])


def make_state():
    pax.seed_rng_key(42)
    model = pax.Linear(8, 16)
    adam = pax.optim.from_optax(optax.adam(1e-3))(model.parameters())
    keys = jax.random.split(jax.random.key(0), 4)
    return {"model": model, "optimizer": adam, "rng": keys, "steps": {"epoch": 3}}


def same(state, expected):
    def compare(one, other):
        if hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    jax.tree_util.tree_map(compare, dict(state), expected)


def test_restored_on_every_mesh(folder):
    expected = make_state()
    state = dict(expected)
    mesh = mesh_of(2, 2)
    state["model"] = sharding.shard(state["model"], mesh, RULES)
    follow = sharding.following(state["model"], RULES)
    state["optimizer"] = sharding.shard(state["optimizer"], mesh, follow)
    with Checkpoints(folder / "meshes") as checkpoints:
        checkpoints.save(1, **state)
    shapes = jax.eval_shape(make_state)
    shapes["steps"] = {"epoch": 0}
    for sizes in [(2, 2), (4, 1), (1, 4), (2, 4), (1, 1)]:
        mesh = mesh_of(*sizes)
        restored = checkpoints.restore(mesh=mesh, rules=RULES, **shapes)
        same(restored, expected)
        assert restored["steps"] == {"epoch": 3}
        weight = restored["model"].weight
        assert weight.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
        shard = (8 // sizes[0], 16 // sizes[1])
        assert {each.data.shape for each in weight.addressable_shards} == {shard}
        momentum = restored["optimizer"].state[0].mu.weight
        assert momentum.sharding.is_equivalent_to(weight.sharding, 2)
        assert restored["rng"].sharding.is_fully_replicated
    # Without a mesh: where the targets are, or where jax puts it.
    restored = checkpoints.restore(model=shapes["model"])
    assert restored["model"].weight.devices() == {jax.devices()[0]}
    assert not restored["model"].weight.committed
    restored = checkpoints.restore(model=state["model"])
    assert restored["model"].weight.sharding == state["model"].weight.sharding


def test_rules_that_do_not_fit(folder):
    checkpoints = Checkpoints(folder / "meshes")
    with refused(ValueError, "attention"):
        checkpoints.restore(
            mesh=mesh_of(2, 2), rules={"attention.*": P("data")}, model=pax.Linear(8, 16)
        )
    with refused(ValueError, where="mesh="):
        checkpoints.restore(rules=RULES, model=pax.Linear(8, 16))


def test_a_flipped_bit_in_a_shard(folder):
    model = sharding.shard(pax.Linear(64, 64), mesh_of(4, 2), RULES)
    with Checkpoints(folder / "flipped") as checkpoints:
        checkpoints.save(1, model=model)
    (largest,) = sorted(
        (folder / "flipped" / "1" / "model").rglob("d/*"), key=lambda path: path.stat().st_size
    )[-1:]
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with refused(OSError, "model.weight", "float32[64,64]", "/1/model"):
        checkpoints.restore(model=model)


if __name__ == "__main__":
    warnings.simplefilter("error")
    import pathlib

    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test(pathlib.Path(sys.argv[1]))
            print(name)
