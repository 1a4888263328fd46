"""Every transform under every other, on modules with all that a module may hold.

Each pair is compared with the same two transforms taken apart by hand: the
inner function is called in Python loops, on modules that `pure` opened.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jmp
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.transforms.each import ROWS, N
from tests.transforms.models import assert_trees_close, batch, stacked

half = jmp.get_policy("params=float32,compute=bfloat16,output=float32")


class Net(pax.Module):
    """Weights, statistics, a typed and a legacy key, a frozen part, a policy."""

    def __init__(self):
        super().__init__()
        self.linear = pax.apply_mp_policy(pax.Linear(2, 2), half)
        self.frozen = pax.freeze_parameters(pax.Linear(2, 2))
        self.bn = pax.BatchNorm1D(2)
        self.legacy = pax.Dropout(0.5)
        self.typed = pax.RngSeq(rng_key=jax.random.wrap_key_data(pax.next_rng_key()))

    def __call__(self, x):
        x = self.legacy(self.bn(self.frozen(self.linear(x))[None])[0])
        return x + jax.random.uniform(self.typed.next_rng_key(), x.shape)


def call(net, x):
    """What is transformed: a loss, the net, which the call changes, and an output."""
    y = net(x)
    return jnp.sum(y**2), net, y


TRANSFORMS = {name: row.pair for name, row in ROWS.items() if row.pair}
BY_HAND = {name: row.by_hand for name, row in ROWS.items() if row.pair}
MAPS = ("vmap", "scan")


def many(count):
    """A net, or nets stacked as often, and inputs for them."""
    net = Net
    for _ in range(count):
        net = (lambda build: lambda: stacked([build() for _ in range(N)]))(net)
    return net(), batch(*(N,) * count, 3, 2)


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_pair(outer, inner):
    count = (outer in MAPS) + (inner in MAPS)
    net, x = many(count)
    before = jax.tree_util.tree_leaves(net)
    got = TRANSFORMS[outer](TRANSFORMS[inner](call))(net, x)
    expected = BY_HAND[outer](BY_HAND[inner](pax.pure(call)))(net, x)
    assert_trees_close(got, expected, 2e-2)  # bfloat16 inside
    assert all(a is b for a, b in zip(before, jax.tree_util.tree_leaves(net)))


@pytest.mark.parametrize("outer", TRANSFORMS)
def test_state_is_written_back_through_two(outer):
    """Inside of pure the nets are changed in place, and stay the objects that they are."""
    net, x = many(outer in MAPS)

    def step(net, x):
        parts = net, net.bn, net.bn.ema_mean, net.legacy
        TRANSFORMS[outer](T.remat(call))(net, x)
        assert (net, net.bn, net.bn.ema_mean, net.legacy) == parts
        assert net.bn is parts[1] and net.bn.ema_mean is parts[2]
        return net

    new = pax.pure(step)(net, x)
    expected = BY_HAND[outer](pax.pure(call))(net, x)[1]
    assert_trees_close(new, expected, 2e-2)
