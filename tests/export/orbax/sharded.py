"""Exports over 8 virtual devices, or restores such an export over another mesh.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    python -m tests.export.orbax.sharded export DIRECTORY
    python -m tests.export.orbax.sharded restore DIRECTORY

DTensor wants TensorFlow from the start, so this is a program of its own.  It
prints what it finds as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pax_export.export import orbax
from pax_export.export.orbax import dtensor_utils

SPECS = {"w": PartitionSpec("x", "y"), "b": PartitionSpec(("x", "y")), "scale": PartitionSpec()}
CONFIG = orbax.ServingConfig("s", [tf.TensorSpec([None, 8], tf.float32, name="x")])


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def params(mesh, factor):
    values = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8.0), "scale": jnp.float32(2)}
    return {
        name: jax.device_put(factor * value, NamedSharding(mesh, SPECS[name]))
        for name, value in values.items()
    }


def apply(params, x):
    return {"y": x @ params["w"] * params["scale"] + params["b"]}


def module(given, function=apply, **arguments):
    return orbax.JaxModule(given, function, input_polymorphic_shape="b, ...", **arguments)


def refusal(make):
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def layouts(made):
    return {variable.name: list(variable.layout.sharding_specs) for variable in made.variables}


def shards(made):
    """The first number and the shape of the part of `w` on each device."""
    (w,) = (variable for variable in made.variables if variable.name == "w:0")
    parts = tf.experimental.dtensor.unpack(w.read_value())
    return [[float(part.numpy().flat[0]), part.shape.as_list()] for part in parts]


def export(directory):
    mesh = mesh_of(4, 2)
    given = params(mesh, 1)
    found = {"specs": orbax.get_pspec_from_jax_arrays(given) == SPECS}
    with orbax.maybe_enable_dtensor_export_on(mesh):
        current = orbax.get_current_mesh()
        found["meshes"] = current.jax_mesh is mesh and (
            current.dtensor_mesh is orbax.get_current_dtensor_mesh()
        )
        found["no specs"] = refusal(lambda: module(given))
        found["several axes"] = refusal(lambda: module(given, pspecs=SPECS))
        numbers = {**given, "b": jnp.arange(7.0)}
        uneven = {**SPECS, "b": PartitionSpec("x")}
        found["uneven"] = refusal(lambda: module(numbers, pspecs=uneven))
        made = module(given, pspecs=SPECS, allow_multi_axis_sharding_consolidation=True)
        found["layouts"], found["shards"] = layouts(made), shards(made)
        manager = orbax.ExportManager(made, [CONFIG])
        manager.save(directory + "/1")

        def placed(params, x):
            y = jax.lax.with_sharding_constraint(
                apply(params, x)["y"], NamedSharding(mesh, PartitionSpec(None, "y"))
            )
            on_x = NamedSharding(mesh, PartitionSpec(None, "x"))
            return {"y": jax.jit(lambda y: y, in_shardings=on_x, out_shardings=on_x)(y)}

        def by_hand(params, x):
            spec = PartitionSpec("x")
            run = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
            return {"y": run(params["b"]) + x}

        arguments = {"pspecs": SPECS, "allow_multi_axis_sharding_consolidation": True}
        of_places = module(given, placed, **arguments)
        orbax.ExportManager(of_places, [CONFIG]).save(directory + "/placed")
        found["by hand"] = refusal(
            lambda: orbax.ExportManager(module(given, by_hand, **arguments), [CONFIG]).save(
                directory + "/by_hand"
            )
        )
    found["outside"] = refusal(lambda: module(given, pspecs=SPECS))
    made.update_variables(params(mesh, 2))  # the module knows its mesh
    found["updated"] = shards(made)[0]
    with orbax.maybe_enable_dtensor_export_on(mesh):
        manager.save(directory + "/2")
    return found


def restore(directory):
    mesh = mesh_of(2, 4)
    with orbax.maybe_enable_dtensor_export_on(mesh):
        made = module(params(mesh, 0), pspecs=SPECS, allow_multi_axis_sharding_conslidation=True)
        manager = orbax.ExportManager(made, [CONFIG])
        checkpoint = tf.train.Checkpoint(manager.tf_module)
        checkpoint.restore(directory + "/1/variables/variables").expect_partial()
    return {"layouts": layouts(made), "shards": shards(made)}


if __name__ == "__main__":
    orbax.initialize_dtensor()
    found = {"export": export, "restore": restore}[sys.argv[1]](sys.argv[2])
    found["initialized"] = dtensor_utils.dtensor_initialized()
    orbax.shutdown_dtensor()
    found["shut down"] = not dtensor_utils.dtensor_initialized()
    print(json.dumps(found))
