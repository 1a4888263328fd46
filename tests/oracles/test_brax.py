"""Policies of Brax' PPO in onnxruntime and LiteRT, where brax is installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close

pytest.importorskip("brax")
SIZE = 27


@pytest.fixture(scope="module")
def made():
    from brax.training.acme import running_statistics, specs
    from brax.training.agents.ppo import networks

    nets = networks.make_ppo_networks(
        SIZE, 8, preprocess_observations_fn=running_statistics.normalize
    )
    seen = running_statistics.init_state(specs.Array((SIZE,), jnp.dtype("float32")))
    observed = jax.random.normal(jax.random.key(0), (256, SIZE)) * 3 + 1
    seen = running_statistics.update(seen, observed)
    params = (
        seen,
        nets.policy_network.init(jax.random.key(1)),
        nets.value_network.init(jax.random.key(2)),
    )
    return networks.make_inference_fn(nets), params


@pytest.mark.parametrize("to", [pax.export.to_onnx, pax.export.to_tflite])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_policy_acts_as_in_jax(made, tmp_path, to, deterministic):
    make_policy, params = made

    def policy(params, observation, key):
        return make_policy(params, deterministic=deterministic)(observation, key)[0]

    key, path = jax.random.key(3), tmp_path / "policy"
    assert to((params, policy), path, (pax.export.spec(f"batch, {SIZE}"), key)).validated
    observation = np.random.default_rng(0).normal(size=(5, SIZE)).astype(np.float32)
    assert_close(pax.export.load(path)(observation, key), policy(params, observation, key), 1e-5)
