"""Loss scales: pytrees that pass through jit, in every dtype, ours and jmp's."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export.precision import DynamicLossScale, NoOpLossScale, StaticLossScale, adjust, unscale
from tests.refusals import refused

START = [jnp.float16(2**15), jnp.float32(2**15), jnp.bfloat16(2**15), jnp.asarray(2.0**15)]
BOTH = pytest.mark.parametrize("kind", [DynamicLossScale, jmp.DynamicLossScale])


def kinds(tree):
    return [(x.shape, x.dtype, jnp.asarray(x).weak_type) for x in jax.tree_util.tree_leaves(tree)]


@BOTH
@pytest.mark.parametrize("start", START, ids=lambda x: f"{x.dtype}{'*' * x.weak_type}")
def test_growing_and_shrinking(kind, start):
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(finite)
        return adjust(scale, finite)

    scale, values = kind(start, period=2), []
    first = kinds(scale)
    for finite in (True, False, True, True, False, False, True):
        scale = step(scale, jnp.array(finite))
        values.append((float(scale.loss_scale), int(scale.counter)))
        assert kinds(scale) == first and isinstance(scale, kind)
    up = 2**15
    assert values == [
        (up, 1), (up / 2, 0), (up / 2, 1), (up, 0), (up / 2, 0), (up / 4, 0), (up / 4, 1)
    ]  # fmt: skip
    assert len(traces) == 1
    assert (scale.period, scale.factor) == (2, 2)


@BOTH
def test_a_scale_never_overflows(kind):
    scale = kind(jnp.float16(2**15), period=1)
    for _ in range(3):
        scale = adjust(scale, jnp.array(True))
    assert float(scale.loss_scale) == 2**15


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_that_grows_for_long_keeps_the_gradients(kind, dtype):
    scale = kind(jnp.asarray(2.0**100, dtype), period=1)
    scale, _ = jax.lax.scan(lambda s, _: (adjust(s, jnp.array(True)), None), scale, None, 99)
    assert float(scale.loss_scale) == 2.0**126
    for each in (scale, kind(jnp.asarray(2.0**127, dtype)), StaticLossScale(2.0**127)):
        scaled, constant = each.scale(jnp.float32(0.5)), functools.partial(unscale, each)
        assert float(constant(scaled)) == float(jax.jit(constant)(scaled)) == 0.5


@BOTH
@pytest.mark.parametrize("lowest", [np.float32(4), jnp.float16(4), np.asarray(4.0)])
def test_a_scale_does_not_shrink_below_its_minimum(kind, lowest):
    scale = kind(jnp.float16(8), min_loss_scale=lowest)
    values = []
    for _ in range(3):
        scale = adjust(scale, jnp.array(False))
        values.append(float(scale.loss_scale))
    assert values == [4, 4, 4] and scale.loss_scale.dtype == jnp.float16


def test_the_minimum_survives_jit():
    scale = jax.jit(lambda s: s)(DynamicLossScale(8.0, min_loss_scale=4.0))
    assert float(scale.min_loss_scale) == 4


@pytest.mark.parametrize("value", [2.0**15, 2**15, np.float64(2**15), jnp.asarray(2.0**15)])
def test_numbers_become_strong_scalars(value):
    for kind in (DynamicLossScale, StaticLossScale):
        scale = kind(value).loss_scale
        assert isinstance(scale, jax.Array) and not scale.weak_type
        assert scale.dtype == jnp.float32


@pytest.mark.parametrize("value", [jnp.ones(2), jnp.array(3), "1", None, True])
@pytest.mark.parametrize("kind", [DynamicLossScale, StaticLossScale])
def test_other_shapes_are_refused(kind, value):
    with refused(TypeError, got=f"{type(value).__name__}: {value!r}"):
        kind(value)


def test_scale_and_unscale():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.float16)}
    for scale in (StaticLossScale(4.0), DynamicLossScale(4.0), StaticLossScale(jnp.float16(4))):
        assert scale.scale(tree["a"]).tolist() == [4, 4]
        back = scale.unscale(tree)
        assert [back[k].dtype for k in "ab"] == [jnp.float32, jnp.float16]
        assert [back[k].tolist() for k in "ab"] == [[0.25, 0.25]] * 2
    assert NoOpLossScale().unscale(tree) is NoOpLossScale().scale(tree) is tree


def test_a_small_gradient_survives_a_half_precision_scale():
    tiny = jnp.float32(2.0**-100)
    for scale in (StaticLossScale(jnp.float16(2**15)), jmp.StaticLossScale(jnp.float16(2**15))):
        assert float(unscale(scale, tiny * 2**15)) == float(tiny)


def test_they_are_jmps():
    assert isinstance(NoOpLossScale(), jmp.NoOpLossScale)
    assert isinstance(StaticLossScale(1.0), jmp.StaticLossScale)
    assert isinstance(DynamicLossScale(1.0), jmp.DynamicLossScale)
    assert NoOpLossScale().loss_scale == 1


SCALES = [NoOpLossScale(), StaticLossScale(8.0), DynamicLossScale(8.0, period=3, factor=4)]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
def test_as_pytrees(scale):
    leaves, treedef = jax.tree_util.tree_flatten(scale)
    assert treedef == jax.tree_util.tree_structure(copy.deepcopy(scale))
    assert hash(treedef) == hash(jax.tree_util.tree_structure(pickle.loads(pickle.dumps(scale))))
    again = jax.jit(lambda s: s)(scale)
    assert type(again) is type(scale) and jax.tree_util.tree_structure(again) == treedef
    holes = jax.tree_util.tree_map(lambda x: object(), scale)
    assert jax.tree_util.tree_structure(holes) == treedef
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(scale)]
    assert paths == [".loss_scale", ".counter", ".min_loss_scale"][: len(leaves)]


def test_a_module_can_hold_one():
    class State(pax.StateModule):
        def __init__(self):
            super().__init__()
            self.scale = DynamicLossScale(8.0)

        def shrink(self):
            self.scale = self.scale.adjust(jnp.array(False))

    state, _ = pax.module_and_value(State().shrink)()
    assert float(state.scale.loss_scale) == 4
    assert State().pytree_attributes == ("scale",)


def test_all_finite_must_be_one_boolean():
    with refused(AssertionError, got="an array of shape (1,)"):
        DynamicLossScale(8.0).adjust(jnp.array([True]))


def test_other_values_are_refused():
    with refused(TypeError, "scale", "fix: pax.precision.DynamicLossScale(2.0**15)"):
        unscale(2.0, {})


def test_a_loss_scale_with_methods_of_its_own_is_asked():
    class Own(jmp.DynamicLossScale):
        def unscale(self, tree):
            return "own"

        def adjust(self, grads_finite):
            return "adjusted"

    own = Own(jnp.float32(1))
    assert (unscale(own, {}), adjust(own, jnp.array(True))) == ("own", "adjusted")
