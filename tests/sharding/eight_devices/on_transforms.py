"""`transforms.jit` with shardings of states: row J3 of the table of behaviour."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export import transforms as T


def test_jit_j3_constrained_state():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layer = pax.Linear(16, 32).with_sharding(weight=("data", "model"))
    double = T.jit(lambda layer: layer.map(lambda leaf: 2 * leaf), constrain_state=True)
    with jax.set_mesh(mesh):
        new = double(layer)
    assert new.weight.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert {shard.data.shape for shard in new.weight.addressable_shards} == {(8, 8)}
    assert new.bias.sharding.is_equivalent_to(NamedSharding(mesh, P()), 1)
    assert bool(jnp.all(new.weight == 2 * layer.weight))

    bound = T.jit(
        lambda layer: layer,
        in_shardings=(T.get_named_sharding(layer, mesh),),
        out_shardings=NamedSharding(mesh, P()),
    )
    assert {shard.data.shape for shard in bound(layer).weight.addressable_shards} == {(16, 32)}

    where, x = T.get_named_sharding(layer, mesh), jnp.ones(3)
    old = jax.device_put(layer.map(jnp.copy), where)
    new, _ = T.jit(
        lambda layer, x: (layer.map(lambda leaf: leaf + 1), x),
        in_shardings=(where, None),
        out_shardings=(where, None),
        donate_state=True,
    )(old, x)
    assert old.weight.is_deleted() and old.bias.is_deleted() and not x.is_deleted()
    assert {shard.data.shape for shard in new.weight.addressable_shards} == {(8, 8)}

    norm = pax.BatchNorm1D(8)
    call = T.jit(lambda norm, x: norm(x), in_shardings=(None, NamedSharding(mesh, P("data"))))
    changed, _ = pax.module_and_value(call)(norm, jnp.ones((4, 2, 8)))
    assert not jnp.array_equal(changed.ema_mean.averages, norm.ema_mean.averages)

    both = T.jit(lambda both: both, in_shardings=(None,), donate_state=True)
    with pytest.raises(ValueError, match="argument 0"):
        both({"layer": layer, "x": x})

    def split_rows(layer):
        rows = NamedSharding(mesh, P(("data", "model")))
        return layer.replace(weight=jax.lax.with_sharding_constraint(layer.weight, rows))

    new = T.jit(lambda layer: layer.map(jnp.sin), constrain_state=split_rows)(layer)
    assert {shard.data.shape for shard in new.weight.addressable_shards} == {(2, 32)}
    stacked = T.Vmap(
        lambda: pax.Linear(16, 32).with_sharding(weight=("data", "model")),
        axis_size=3,
        transform_metadata={T.PARTITION_NAME: None},
    )()
    placed = jax.device_put(stacked, T.get_named_sharding(stacked, mesh)).vmap_module.weight
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 8, 8)}
