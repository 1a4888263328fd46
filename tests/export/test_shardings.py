"""What a program asks of several devices, in an export for one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pax_export._errors import UnsupportedOperationError
from pax_export.export.lowering.lower import lower_traced, portable
from pax_export.export.tracing.traced import trace

MESH = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
ON_Y = NamedSharding(MESH, PartitionSpec(None, "y"))


def placed(x):
    y = jax.lax.with_sharding_constraint(jnp.sin(x), ON_Y)
    return jax.jit(lambda y: 2 * y, in_shardings=ON_Y, out_shardings=ON_Y)(y)


def lowered(function, *shape):
    traced = trace(lambda arrays: [function(*arrays)], [jax.ShapeDtypeStruct(shape, "float32")])
    return lower_traced(traced, ("cpu",))


def text(module):
    with mlir.make_ir_context() as context:
        return str(stablehlo.deserialize_portable_artifact(context, module))


@pytest.mark.parametrize("shardy", [True, False])
def test_a_place_changes_no_number_and_is_left_out(shardy):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        (batch,) = jax.export.symbolic_shape("batch")
        written = text(lowered(placed, batch, 8).portable.module)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert "sdy" not in written and "harding" not in written
    assert "sine" in written and "mhlo.num_partitions = 1" in written


def test_shardings_of_arguments_are_left_out():
    struct = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=ON_Y)
    exported = jax.export.export(jax.jit(placed), platforms=("cpu",))(struct)
    written = text(portable(exported.mlir_module_serialized, single=True).module)
    assert "sdy" not in written and "sine" in written


def test_what_each_device_computes_is_refused():
    spec = PartitionSpec("x")
    by_hand = jax.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=spec, out_specs=spec)
    with pytest.raises(UnsupportedOperationError) as caught:
        lowered(by_hand, 8)
    assert caught.value.what == (
        "The model says what each device computes, and an export for one device cannot."
    )
    assert caught.value.got == "jax.shard_map"
    assert "to_stablehlo" in caught.value.write
