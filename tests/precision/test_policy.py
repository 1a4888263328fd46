"""Putting policies on modules and taking them off: classes, dtypes, pickles, errors."""

from __future__ import annotations

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export.precision import policy_of
from tests.precision.models import FHF, HHH, B, F, H, Layer
from tests.refusals import refused


def structure(module):
    return jax.tree_util.tree_structure(module)


def test_own_arrays_get_the_param_dtype_in_containers_too():
    layer = Layer()
    half = pax.apply_mp_policy(layer, HHH)
    arrays = [half.weight, *jax.tree_util.tree_leaves(half.pair), half.mixed[0]]
    assert {x.dtype for x in arrays} == {jnp.dtype(H)}
    assert half.count.dtype == jnp.int32
    assert half.mixed[1] is jax.nn.relu
    assert half.child == layer.child and half.children == layer.children
    assert layer.weight.dtype == F


def test_arrays_of_the_param_dtype_stay_the_same_objects():
    layer = Layer()
    assert pax.apply_mp_policy(layer, FHF).weight is layer.weight
    assert pax.unwrap_mp_policy(pax.apply_mp_policy(layer, FHF)) == layer


def test_one_class_for_a_class_and_a_policy():
    layer = pax.Linear(2, 3)
    written_in_other_ways = [
        jmp.Policy(np.dtype("float32"), np.float16, jnp.dtype("float32")),
        jmp.Policy("float32", "float16", "float32"),
        jmp.get_policy("p=f32,c=f16,o=f32"),
    ]
    first = pax.apply_mp_policy(layer, FHF)
    for policy in written_in_other_ways:
        again = pax.apply_mp_policy(layer, policy)
        assert type(again) is type(first) and structure(again) == structure(first)
    assert type(pax.apply_mp_policy(layer, HHH)) is not type(first)


def test_two_models_of_one_recipe_are_traced_once():
    traces = []

    @jax.jit
    def call(layer, x):
        traces.append(x)
        return layer(x)

    for _ in range(3):
        call(pax.freeze_parameters(pax.apply_mp_policy(pax.Linear(2, 3), FHF)), jnp.ones((1, 2)))
    assert len(traces) == 1


def test_many_policies_on_one_model_leave_no_classes_behind():
    layer = pax.Linear(2, 3)
    for _ in range(3):
        pax.unwrap_mp_policy(pax.apply_mp_policy(layer, FHF))
    gc.collect()
    before = len(pax.Linear.__subclasses__())
    for _ in range(20):
        pax.unwrap_mp_policy(pax.apply_mp_policy(layer, FHF))
    assert len(pax.Linear.__subclasses__()) == before


def test_wrapped_classes_keep_their_metadata():
    layer = pax.apply_mp_policy(pax.Linear(2, 3), FHF)
    cls = type(layer)
    assert isinstance(layer, pax.Linear) and cls is not pax.Linear
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (
        "Linear", "Linear", pax.Linear.__module__
    )  # fmt: skip
    assert cls.__call__.__doc__ == pax.Linear.__call__.__doc__
    assert layer.eval().train() == layer
    for same_policy in (
        layer.eval(),
        layer.parameters(),
        layer.copy(),
        jax.jit(lambda m: m)(layer),
    ):
        assert policy_of(same_policy) == FHF


@pytest.mark.parametrize("steps", ["fpu", "pfu", "pfpu-twice", "pru", "rpu"])
def test_freezing_and_unwrapping_in_any_order(steps):
    layer = pax.Linear(2, 3)
    frozen = pax.freeze_parameters(layer)
    wrapped = pax.apply_mp_policy(layer, FHF)
    both = pax.apply_mp_policy(frozen, FHF)
    assert type(both) is type(pax.freeze_parameters(wrapped))
    assert type(both) is type(pax.freeze_parameters(both))
    if "r" in steps:
        methods = {"__call__": lambda self, x: x + self.bias.dtype.itemsize}
        other = layer.replace_method(**methods)
        one_way = pax.apply_mp_policy(other, FHF)
        assert type(one_way) is type(wrapped.replace_method(**methods))
        assert one_way(jnp.zeros(3)).tolist() == [2, 2, 2]
        assert type(pax.unwrap_mp_policy(one_way)) is type(other)
    unwrapped = pax.unwrap_mp_policy(both)
    assert type(unwrapped) is type(frozen)
    assert repr(unwrapped) == repr(layer)
    assert jax.tree_util.tree_leaves(unwrapped.parameters()) == []
    assert pax.unfreeze_parameters(both, origin=wrapped) == wrapped


def test_pickle_and_copies():
    layer = pax.freeze_parameters(pax.apply_mp_policy(pax.Linear(2, 3), FHF)).eval()
    x = jnp.ones((1, 2))
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), copy.copy(layer)):
        assert type(again) is type(layer) and structure(again) == structure(layer)
        assert (again(x) == layer(x)).all()


@pytest.mark.parametrize(
    "policy, letters",
    [
        (FHF, "FHF"),
        (jmp.Policy(H, B, F), "HHF"),
        (jmp.Policy(np.dtype("float32"), np.dtype("float16"), np.dtype("float32")), "FHF"),
        (jmp.Policy(F, np.dtype("float64"), F), "FFF"),
        (jmp.Policy(jnp.float8_e4m3fn, F, F), "float8_e4m3fn-F-F"),
    ],
)
def test_repr_names_the_policy(policy, letters):
    layer = pax.apply_mp_policy(pax.Linear(2, 3), policy)
    assert repr(layer) == f"Linear(in_dim=2, out_dim=3, with_bias=True, mp_policy={letters})"
    layer = pax.apply_mp_policy(Layer(), policy)
    assert repr(layer) == f"Layer(parameters=22, mode=train, mp_policy={letters})"
    assert layer.summary(return_list=True)[0] == f"Layer(mp_policy={letters})"


def test_a_second_policy_is_refused():
    layer = pax.apply_mp_policy(pax.Linear(2, 3), FHF)
    with refused(ValueError, got="Linear(in_dim=2, out_dim=3, with_bias=True, mp_policy=FHF)"):
        pax.apply_mp_policy(layer, HHH)


def test_unwrapping_a_plain_module_is_refused():
    with refused(ValueError, got="Linear(in_dim=2, out_dim=3, with_bias=True)"):
        pax.unwrap_mp_policy(pax.freeze_parameters(pax.Linear(2, 3)))


@pytest.mark.parametrize(
    "wrong",
    ["half", None, jmp.Policy(F, jnp.int32, F), jmp.Policy(F, None, F), jmp.Policy(F, "f17", F)],
)
def test_other_policies_are_refused(wrong):
    with refused(TypeError, got=repr(wrong)):
        pax.apply_mp_policy(pax.Linear(2, 3), wrong)


@pytest.mark.parametrize("function", [lambda m: pax.apply_mp_policy(m, FHF), pax.unwrap_mp_policy])
def test_other_values_are_refused(function):
    with refused(TypeError, "mp_policy"):
        function(jnp.ones(3))
