"""The policies that layers get by default, and PAX's names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export import core
from pax_export.precision import policy_of

FHF = jmp.Policy(jnp.float32, jmp.half_dtype(), jnp.float32)
FFF = jmp.Policy(jnp.float32, jnp.float32, jnp.float32)


class MyLinear(pax.Linear):
    pass


@pytest.mark.parametrize(
    "build, policy",
    [
        (lambda: pax.Linear(2, 2), FHF),
        (lambda: MyLinear(2, 2), FHF),
        (lambda: pax.Conv1D(2, 2, 3), FHF),
        (lambda: pax.Conv2D(2, 2, 3), FHF),
        (lambda: pax.Conv1DTranspose(2, 2, 3), FHF),
        (lambda: pax.Conv2DTranspose(2, 2, 3), FHF),
        (lambda: pax.BatchNorm1D(2), FFF),
        (lambda: pax.BatchNorm2D(2), FFF),
        (lambda: pax.LayerNorm(2, -1, True, True), FFF),
        (lambda: pax.GroupNorm(1, 2), FFF),
        (lambda: pax.RMSNorm(2), FFF),
        (lambda: pax.Dropout(0.5), None),
        (lambda: pax.Embed(2, 2), None),
        (lambda: pax.Sequential(pax.Linear(2, 2)), None),
    ],
)
def test_the_policy_of_each_kind(build, policy):
    layer = build()
    wrapped = pax.experimental.default_mp_policy(layer)
    assert policy_of(wrapped) == policy
    assert (wrapped is layer) == (policy is None)


def test_the_summary_of_the_seed():
    net = pax.Sequential(pax.Linear(3, 3), pax.BatchNorm1D(3))
    assert net.apply(pax.experimental.default_mp_policy).summary() == (
        "Sequential\n"
        "├── modules.0: Linear(in_dim=3, out_dim=3, with_bias=True, mp_policy=FHF)\n"
        "└── modules.1: BatchNorm1D(num_channels=3, create_scale=True, create_offset=True, "
        "data_format=NWC, decay_rate=0.9, mp_policy=FFF)"
    )


def test_a_net_that_is_wrapped_in_part():
    full = pax.apply_mp_policy(pax.Linear(3, 3), FFF)
    net = pax.Sequential(full, pax.Linear(3, 3)).apply(pax.experimental.default_mp_policy)
    assert [policy_of(layer) for layer in net.modules] == [FFF, FHF]
    again = net.apply(pax.experimental.default_mp_policy)
    assert again == net


def test_a_net_computes_in_half_and_keeps_its_weights_in_full():
    net = pax.Sequential(pax.Linear(4, 8), jax.nn.relu, pax.Linear(8, 2))
    half = net.apply(pax.experimental.default_mp_policy)
    x = jnp.ones((2, 4)) / 3
    assert 0 < float(abs(half(x) - net(x)).max()) < 1e-2
    assert {w.dtype for w in jax.tree_util.tree_leaves(half)} == {jnp.dtype(jnp.float32)}


def test_paxs_names_are_the_objects_of_their_rooms():
    assert pax.experimental.mutable is core.mutable
    assert pax.experimental.save_weights_to_dict is core.state_dict
    assert pax.experimental.load_weights_from_dict is core.load_state_dict
    assert pax.experimental.apply_scaled_gradients is pax.optim.apply_scaled_gradients
