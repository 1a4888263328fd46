"""Params that are sharded over devices, as variables that are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import PartitionSpec

from pax_export.export.orbax import dtensor_utils
from tests.closeness import assert_close
from tests.refusals import refused

ROOT = Path(__file__).parents[3]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.export.orbax.sharded", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run("export", str(folder))


def test_variables_are_sharded_as_the_arrays(exported):
    _, found = exported
    assert found["specs"] and found["meshes"]
    assert found["initialized"] and found["shut down"]
    assert found["layouts"] == {"w:0": ["x", "y"], "b:0": ["x"], "scale:0": []}
    # w holds 0 ... 63 in 8 rows; 4 parts of 2 rows, 2 of 4 columns.
    assert found["shards"] == [
        [float(16 * row + 4 * column), [2, 4]] for row in range(4) for column in range(2)
    ]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no specs", "a DTensor mesh"),
        ("several axes", "sharded across more than one axis"),
        ("uneven", "implies that array axis 0 is partitioned"),  # jax's words
        ("by hand", "has per-device computations"),
        ("outside", "no DTensor mesh"),
    ],
)
def test_unsupported_shardings_are_refused(exported, case, words):
    assert words in exported[1][case]


def test_an_update_keeps_the_sharding(exported):
    folder, found = exported
    assert found["updated"] == [0.0, [2, 4]]
    x = np.ones((2, 8), np.float32)
    w, b = np.arange(64.0).reshape(8, 8), np.arange(8.0)
    for name, factor in (("1", 1), ("2", 2)):
        output = tf.saved_model.load(str(folder / name)).signatures["s"](x=tf.constant(x))
        assert_close(output["y"], x @ (factor * w) * 2 * factor + factor * b)


def test_a_function_that_asks_for_places_is_exported_without_them(exported):
    folder, _ = exported
    x = np.ones((2, 8), np.float32)
    output = tf.saved_model.load(str(folder / "placed")).signatures["s"](x=tf.constant(x))
    assert_close(output["y"], x @ np.arange(64.0).reshape(8, 8) * 2 + np.arange(8.0))


def test_a_process_with_another_mesh_restores_it(exported):
    folder, _ = exported
    found = run("restore", str(folder))
    assert found["layouts"] == {"w:0": ["x", "y"], "b:0": ["y"], "scale:0": []}
    # Now 2 parts of 4 rows, 4 of 2 columns, with the numbers that were saved.
    assert found["shards"] == [
        [float(32 * row + 2 * column), [4, 2]] for row in range(2) for column in range(4)
    ]


SIZES = {"x": 4, "y": 2, "one": 1}


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (None, [None, None]),
        (PartitionSpec(), [None, None]),
        (PartitionSpec("x"), ["x", None]),
        (PartitionSpec(None, ("y",)), [None, "y"]),
        (PartitionSpec(("one", "x")), ["x", None]),
        (PartitionSpec(("one",)), ["one", None]),
        (PartitionSpec(("y", "x")), ["x", None]),
    ],
)
def test_which_axis_a_dimension_is_sharded_over(spec, axes):
    assert dtensor_utils.layout_axes((8, 4), spec, SIZES, consolidate=True) == axes


def test_specs_of_arrays_that_have_none():
    struct = jax.ShapeDtypeStruct((2,), "float32")
    assert dtensor_utils.get_pspec_from_jax_arrays([struct]) == [PartitionSpec()]
    with pytest.raises(AssertionError):
        dtensor_utils.get_pspec_from_jax_arrays(jax.numpy.ones(2))


def test_without_dtensor_a_mesh_does_nothing():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    with dtensor_utils.maybe_enable_dtensor_export_on(mesh):
        assert dtensor_utils.get_current_mesh() is None
    with refused(RuntimeError, "DTensor"):
        dtensor_utils.shutdown_dtensor()
