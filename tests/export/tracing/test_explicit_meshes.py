"""Models that read the shardings of their arrays, which exports are traced without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import UnsupportedOperationError
from pax_export.export import load, spec, to_onnx, to_stablehlo
from tests.closeness import assert_close

SPEC = jax.sharding.PartitionSpec("x")


@pytest.fixture
def sharded():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, SPEC))


def is_split(x):
    return jax.typeof(x).sharding.spec[0] == "x"


READING = {
    "branch": lambda p, x: x * 2 if is_split(x) else x,
    "number": lambda p, x: x * (2 if is_split(x) else 3),
    "leaf": lambda p, x: x * 2 if is_split(p) else x,
    "operand": lambda p, x: x if is_split(p) else p,
    "in_specs": lambda p, x: jax.shard_map(lambda y: y * 2, in_specs=SPEC, out_specs=SPEC)(x),
}


@pytest.mark.parametrize("name", READING)
def test_shardings_that_are_read_are_refused(tmp_path, sharded, name):
    with pytest.raises(UnsupportedOperationError) as caught:
        to_stablehlo((sharded, READING[name]), tmp_path / "m", sharded)
    assert "AxisType.Auto" in caught.value.write


def test_other_models_are_exported(tmp_path, sharded):
    net = lambda p, x: jnp.tanh(x * p).sum() + jax.sharding.reshard(x, jax.P())  # noqa: E731
    to_onnx((sharded, net), tmp_path / "m.onnx", sharded)
    assert_close(load(tmp_path / "m.onnx")(sharded), net(sharded, sharded), rtol=1e-5)


def test_inputs_may_be_described_without_shardings(tmp_path, sharded):
    to_stablehlo(lambda x: READING["branch"](None, x), tmp_path / "m", spec("4"))
    assert load(tmp_path / "m")(np.ones(4, "float32")).tolist() == [1] * 4
