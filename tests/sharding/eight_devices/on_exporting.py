"""Bundles whose weights and inputs lie on several devices; beside `test_jax_export.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pax_export.export import load, to_stablehlo
from tests.closeness import assert_close


def test_shardings_over_eight_devices(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    by_row, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    weights = jax.device_put(
        {"w": jnp.ones((8, 2)), "b": jnp.ones(2)}, {"w": by_row, "b": everywhere}
    )
    x = jax.ShapeDtypeStruct((16, 8), "float32", sharding=by_row)
    function = (weights, lambda params, x: jnp.tanh(x @ params["w"] + params["b"]))
    to_stablehlo(function, tmp_path / "bundle", x, vjp_order=1, platforms=("cpu",), validate=False)
    bundle = load(tmp_path / "bundle")
    exported = bundle.exported["serving_default"]
    assert exported.nr_devices == 8, exported.nr_devices

    # Another mesh, with the devices in another order.
    other = Mesh(np.array(jax.devices()[::-1]), ("batch",))
    shardings = exported.in_shardings_jax(other)
    assert shardings[-1].is_equivalent_to(NamedSharding(other, P("batch")), 2), shardings
    assert shardings[1].shard_shape((8, 2)) == (1, 2), shardings
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    placed = bundle.placed(other)
    given = jax.device_put(values, shardings[-1])
    found = placed(given)
    assert_close(found, np.tanh(values @ np.ones((8, 2)) + 1), rtol=1e-5)
    assert len(found.sharding.device_set) == 8
    gradient = jax.grad(lambda x: placed(x).sum())(given)
    assert gradient.shape == (16, 8)

    with pytest.raises(ValueError, match="exported for 8 devices"):
        bundle(values)
