"""What a program asks of several devices, in an export for one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, retarget, spec, to_saved_model
from pax_export.export.artifact import saved_models
from pax_export.export.lowering.lower import lower_traced, portable
from pax_export.export.tracing.traced import trace, vjp
from tests.closeness import assert_close
from tests.consumers.foreign import each_node, save
from tests.export.models import random
from tests.refusals import refused

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
    part = PartitionSpec("x")
    by_hand = jax.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=part, out_specs=part)
    with refused(UnsupportedOperationError, "to_stablehlo", got="jax.shard_map"):
        lowered(by_hand, 8)


ALONE = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))


def talking(params, rows):
    """Everything that devices say to each other, where there is one of them."""

    def part(rows):
        hidden = jnp.tanh(rows @ params["w"])
        parts = [
            jax.lax.psum(hidden, "x"),
            jax.lax.all_gather(hidden, "x", tiled=True),
            jax.lax.ppermute(hidden, "x", [(0, 0)]),
            jax.lax.psum_scatter(hidden, "x", tiled=True),
            jax.lax.all_to_all(hidden, "x", 0, 0, tiled=True),
        ]
        return sum(parts) - jax.lax.pmean(hidden.mean(0), "x") + jax.lax.axis_index("x")

    rows_of = PartitionSpec("x")
    return jax.shard_map(part, mesh=ALONE, in_specs=rows_of, out_specs=rows_of)(rows)


def test_one_device_that_talks_to_itself_is_served_with_gradients(tmp_path):
    params = {"w": random(3, 4)}
    report = to_saved_model((params, talking), tmp_path / "m", spec("batch, 3"), trainable=True)
    assert report.oldest_tensorflow == "2.15"
    rows = random(5, 3)
    hidden = np.tanh(rows @ params["w"])
    assert_close(load(tmp_path / "m")(rows), 5 * hidden - hidden.mean(0), rtol=1e-5, atol=1e-6)


def test_one_device_that_sends_nothing_on_is_refused():
    """What nobody sends is zero; that is for programs of many devices."""
    rows_of = PartitionSpec("x")
    options = {"mesh": ALONE, "in_specs": rows_of, "out_specs": rows_of}
    shifted = jax.shard_map(lambda x: jax.lax.ppermute(x, "x", []), **options)
    with refused(UnsupportedOperationError, got="collective_permute"):
        lowered(shifted, 8)


def test_the_gradient_alone_may_speak_of_devices():
    def function(x):
        rows_of = PartitionSpec("x")
        options = {"mesh": ALONE, "in_specs": rows_of, "out_specs": rows_of}
        return jax.shard_map(lambda x: jax.lax.all_gather(x**2, "x", tiled=True), **options)(x)

    (batch,) = jax.export.symbolic_shape("batch")
    struct = jax.ShapeDtypeStruct((batch, 4), "float32")
    traced = vjp(trace(lambda arrays: [function(*arrays)], [struct]), (0,), (0,))
    written = text(lower_traced(traced, ("cpu",)).portable.module)
    assert "scatter" not in written and "replica_groups" not in written


def _two_devices():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
    )
    struct = jax.ShapeDtypeStruct((4,), np.float32)
    return jax.export.export(jax.jit(summed), platforms=("cpu",))(struct).mlir_module_serialized


def everywhere(params, x):
    """Places that are named under vmap, in a loop, and differentiated."""
    here = NamedSharding(ALONE, PartitionSpec("x"))

    def step(x, _):
        row = jax.vmap(lambda row: jax.lax.with_sharding_constraint(row @ params["w"], here))
        return jax.lax.with_sharding_constraint(jnp.tanh(row(x)), here), None

    return jax.grad(lambda x: jax.lax.scan(step, x, None, length=2)[0].sum())(x)


def test_the_savedmodel_of_jax2tf_with_places_is_mended(tmp_path):
    params = {"w": random(3, 3)}
    save(tmp_path / "old", lambda params, x: {"y": everywhere(params, x)}, params, "(b, 3)")
    report = retarget(tmp_path / "old", out=tmp_path / "new")
    assert report.oldest_tensorflow == "2.15" and report.calling_convention[1] == 8
    serve = tf.saved_model.load(str(tmp_path / "new")).signatures["serving_default"]
    x = random(4, 3)
    assert_close(serve(x=tf.constant(x))["y"], everywhere(params, x), rtol=1e-5, atol=1e-6)


def test_savedmodels_of_several_devices_are_refused(tmp_path):
    saved = _saved_for_two_devices(tmp_path)
    with refused(UnsupportedOperationError, "to_stablehlo", got="jax.shard_map"):
        retarget(saved, out=tmp_path / "new")


def _saved_for_two_devices(folder):
    save(folder / "old", lambda params, x: {"y": x @ params["w"]}, {"w": random(3, 3)}, "(b, 3)")
    model = saved_models.read_saved_model(folder / "old", "test")
    for _, node in each_node(model, "XlaCallModule"):
        node.attr["module"].s = _two_devices()
    (folder / "old" / saved_models.GRAPH_FILE).write_bytes(model.SerializeToString())
    return folder / "old"
