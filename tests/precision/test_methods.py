"""Methods under a policy: what they see, what they return, and what they leave."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms
from tests.closeness import assert_close
from tests.precision.models import FHF, HHH, B, Child, F, H, Layer
from tests.refusals import refused


def wrapped(policy=FHF):
    return pax.apply_mp_policy(Layer(), policy)


def leaves(module):
    return jax.tree_util.tree_leaves(module)


def same_objects(a, b):
    return all(x is y for x, y in zip(a, b, strict=True))


def test_dtypes_inside_and_outside_a_call():
    layer = wrapped()
    before = leaves(layer)
    y = layer(jnp.ones((1, 2)))
    assert y.dtype == F
    assert layer.seen.lines == [(jnp.dtype(H),) * 3]
    assert same_objects(leaves(layer), before)
    expected = jnp.ones((1, 2), H) @ layer.weight.astype(H)
    np.testing.assert_array_equal(y, expected.astype(F))


def test_own_arrays_are_cast_and_those_of_submodules_are_not():
    assert wrapped().dtypes() == ({"float16"}, {"float32"})


def test_numpy_arrays_are_cast_and_numbers_and_integers_are_not():
    layer = wrapped()
    given = (np.ones(2), np.ones(2, np.int32), 0.5, jnp.array(True), jax.random.key(0), None, "x")
    inner = []
    layer = layer.replace_method(look=lambda self, *values: inner.extend(values))
    layer.look(*given)
    assert inner[0].dtype == H and type(inner[0]) is np.ndarray
    assert same_objects(inner[1:], given[1:])


def test_the_result_has_the_output_dtype():
    layer = pax.apply_mp_policy(Layer(), FHF.with_output_dtype(B))
    assert layer.give_back({"a": [jnp.ones(2)]})["a"][0].dtype == B
    x = jnp.ones(2, jnp.int32)
    assert layer.give_back(x) is x


def test_what_a_method_calls_on_self_is_not_cast():
    assert wrapped().nested(jnp.ones(2)) == H
    assert wrapped(HHH.with_output_dtype(F)).nested(jnp.ones(2)) == H


class Base(pax.ParameterModule):
    def moments(self, x):
        return x.mean(0), x.var(0)


class Standardize(Base):
    """Calls its helper in every way; its moments do not fit into bfloat16."""

    def moments(self, x):
        return super().moments(x)

    @property
    def helper(self):
        return self.moments

    def __call__(self, x, moments=None):
        mean, variance = (moments or self.moments)(x)
        return (x - mean) / jnp.sqrt(variance + 1e-5)

    def by_itself(self, x):
        return self(x)

    def by_property(self, x):
        return self(x, self.helper)

    def by_transform(self, x):
        return self(x, transforms.remat(self.moments))

    def by_other(self, x):
        return Visitor().visit(self, x)

    def by_copy(self, x):
        return jax.jit(lambda layer, x: layer.copy()(x))(self, x)

    @jax.jit
    def jitted(self, x):
        return self(x)

    def steps(self, x):
        change = yield self(x)
        yield self(x) + change

    def chosen(self):
        return self.__call__


class Visitor(pax.Module):
    def visit(self, layer, x):
        return layer(x)


LARGE = jnp.array([[2001.0], [2003.0], [2005.0], [2007.0]])
SMALL = [-1.342, -0.447, 0.447, 1.342]


@pytest.mark.parametrize(
    "call",
    [
        Standardize.__call__,
        Standardize.by_itself,
        Standardize.by_property,
        Standardize.by_transform,
        Standardize.by_other,
        Standardize.by_copy,
        Standardize.jitted,
        lambda layer, x: next(layer.steps(x)),
        lambda layer, x: layer.chosen()(x),
    ],
)
def test_a_call_is_cast_at_its_border_alone(call):
    layer = pax.apply_mp_policy(Standardize(), jmp.Policy(F, F, B))
    y = getattr(layer, getattr(call, "__name__", ""), lambda x: call(layer, x))(LARGE)
    assert y.dtype == B
    assert_close(y.astype(F).ravel(), SMALL, atol=0.01)


def test_each_step_of_a_generator_is_a_call():
    layer = pax.apply_mp_policy(Standardize(), jmp.Policy(F, H, B))
    steps = layer.steps(LARGE / 100)
    assert next(steps).dtype == steps.send(jnp.ones(1)).dtype == B


def test_a_module_made_from_self_casts_at_its_border_too():
    layer = pax.apply_mp_policy(Standardize(), jmp.Policy(F, F, B))
    layer = layer.replace_method(pair=lambda self: [self, (self.copy(), pax.Sequential(self))])
    first, (second, third) = layer.pair()
    assert first is layer and type(second) is type(third[0]) is type(layer)


@pytest.mark.parametrize(
    "norm", [pax.BatchNorm1D(1), pax.LayerNorm(1, axis=0), pax.GroupNorm(1, 1, axis=0)]
)
@pytest.mark.parametrize("compute", [F, B, H])
def test_norms_under_a_policy(norm, compute):
    x = LARGE - 2004 if compute == B else 300 * (LARGE - 2004) if compute == H else LARGE
    layer = pax.apply_mp_policy(norm, jmp.Policy(F, compute, B))
    y = (layer % x)[1]
    assert y.dtype == B
    assert_close(y.astype(F).ravel(), SMALL, atol=0.02)


def test_which_methods_are_wrapped():
    layer, x = wrapped(), jnp.ones(2)
    assert layer.jitted(x).dtype == layer.bound().dtype == F
    assert layer.static(x) == layer.of_class(x) == F
    assert layer.weight_dtype == F
    assert layer.parameters().weight is layer.weight
    inside = layer.replace_method(both=lambda self, x: (self.static(x), self.weight_dtype))
    assert inside.both(x) == (H, H)


def test_inherited_and_private_methods_are_wrapped():
    class Mixin:
        def mixed_in(self, x):
            return x.dtype.name

    class Below(Layer, Mixin):
        def _private(self, x):
            return x.dtype.name

        def __len__(self):
            return self.weight.dtype.itemsize

    layer = pax.apply_mp_policy(Below(), FHF)
    assert layer._private(jnp.ones(1)) == layer.mixed_in(jnp.ones(1)) == "float16"
    assert len(layer) == 4  # a special method other than __call__


def test_changes_arrive_in_the_param_dtype():
    layer = wrapped()
    new, returned = pax.module_and_value(layer.step)(jnp.ones(()))
    assert returned is new
    assert new.weight.dtype == new.pair[0].dtype == F
    np.testing.assert_array_equal(new.weight, (layer.weight.astype(H) + 1).astype(F))
    assert new.pair[1]["deep"] is layer.pair[1]["deep"]  # not rounded on the way
    assert int(new.count) == 1 and new.child.value.tolist() == [2, 2]
    assert layer.child.value.tolist() == [1, 1]


def test_submodules_keep_their_identity():
    @pax.pure
    def run(layer):
        before = [layer.child, *layer.children]
        layer.step(1.0)
        assert same_objects([layer.child, *layer.children], before)
        return layer

    assert run(wrapped()).child.value.tolist() == [2, 2]


def test_a_call_outside_of_pure_is_refused_and_changes_nothing():
    layer = wrapped()
    before, children = leaves(layer), [layer.child, *layer.children]
    with refused(ValueError, "immutable module"):
        layer.step(1.0)
    assert same_objects(leaves(layer), before)
    assert same_objects([layer.child, *layer.children], children)


def test_an_exception_leaves_the_module_as_it_was():
    @pax.pure
    def run(layer):
        before = leaves(layer)
        with pytest.raises(RuntimeError):
            layer.fail()
        assert same_objects(leaves(layer), before)
        layer.step(1.0)  # still open for change
        return layer

    assert run(wrapped()).weight.dtype == F


def test_arrays_that_only_moved_are_not_rounded():
    layer = wrapped()
    new, _ = pax.module_and_value(layer.swap)()
    assert new.pair[0] is layer.pair[1]["deep"] and new.pair[1]["deep"] is layer.pair[0]


def test_a_container_changed_in_place():
    layer = wrapped()
    new, _ = pax.module_and_value(layer.change_in_place)()
    assert new.pair[0].tolist() == [2, 2, 2] and new.pair[0].dtype == F
    assert layer.pair[0].tolist() == [1, 1, 1]
    with refused(ValueError, "A list of an immutable module"):
        layer.change_in_place()
    assert layer.pair[0].tolist() == [1, 1, 1]


def test_a_container_of_modules_is_one_object_inside_and_outside():
    new, _ = pax.module_and_value(wrapped().append_child)()
    assert [type(child) for child in new.children] == [Child] * 3
    assert len(leaves(new.children)) == 3


def test_attributes_can_be_added_and_deleted():
    new, _ = pax.module_and_value(wrapped().forget)()
    assert not hasattr(new, "scale")
    assert new.extra.dtype == F and "extra" in new.pytree_attributes


def test_a_module_made_from_self_has_the_modules_own_arrays():
    layer = wrapped()
    again = layer.scaled()
    assert type(again) is type(layer) and int(again.count) == 1
    assert again.weight is layer.weight and again.pair[0] is layer.pair[0]


def test_modules_among_arguments_and_results_follow_their_own_policies():
    layer, other = wrapped(), pax.Linear(2, 2)
    assert layer.give_back(other) is other
    assert layer.give_back(layer) is layer
    assert layer.give_back([other, jnp.ones(1)])[0] is other


def test_iterators_are_handed_on():
    layer = wrapped()
    given = iter([jnp.ones(1)])
    assert layer.give_back(given) is given and next(given).dtype == F


def test_cached_properties_do_not_get_in_the_way():
    layer = wrapped()
    assert layer.total.dtype == F
    assert layer.use_total() == "float16"
    assert layer.total.dtype == F


def test_methods_run_as_they_are_while_a_constructor_runs():
    class Built(pax.ParameterModule):
        def __init__(self, fill):
            super().__init__()
            self.weight = jnp.zeros(2)
            self.reset(jnp.asarray(fill))

        def reset(self, fill):
            self.weight = self.weight + fill

        def other(self):
            return type(self)(0.1)

    built = pax.apply_mp_policy(Built(0.1), FHF).other()
    assert built.weight.dtype == F
    np.testing.assert_array_equal(built.weight, jnp.zeros(2) + 0.1)


def test_a_view_that_outlives_its_call_cannot_be_changed():
    class Kept:
        view = None

    layer = wrapped().replace_method(keep=lambda self: setattr(Kept, "view", self))
    pax.pure(lambda layer: layer.keep())(layer)
    with refused(ValueError, "immutable"):
        Kept.view.weight = jnp.ones(1)


def test_the_trace_rule_holds():
    @pax.pure
    def leak(layer):
        jax.jit(lambda: layer.step(1.0))()

    with refused(ValueError, "module"):
        leak(wrapped())


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_under_transforms(transform):
    layer, x = wrapped(), jnp.ones((4, 2))
    y = transform(lambda x: layer(x))(x)
    assert_close(y, layer(x), rtol=1e-3)
    assert y.dtype == F


def test_state_changes_under_jit():
    step = jax.jit(pax.pure(lambda layer: layer.step(1.0)))
    new = step(step(wrapped()))
    assert int(new.count) == 2 and new.weight.dtype == F


def test_two_threads_use_one_module():
    entered, seen = threading.Barrier(2, timeout=20), []

    def wait(self, x):
        entered.wait()
        seen.append((self.weight.dtype.name, x.dtype.name))
        entered.wait()
        return x

    layer = wrapped().replace_method(wait=wait)
    other = threading.Thread(target=layer.wait, args=(jnp.ones(1),))
    before = leaves(layer)
    other.start()
    entered.wait()
    assert layer.weight.dtype == F  # while the other thread is inside
    entered.wait()
    other.join()
    assert seen == [("float16", "float16")]
    assert same_objects(leaves(layer), before)


def test_the_cost_of_a_call_grows_with_the_number_of_layers(monkeypatch):
    from pax_export.precision import _policy

    made = []

    def counted(original, policy, view=_policy.CastView):
        made.append(original)
        return view(original, policy)

    monkeypatch.setattr(_policy, "CastView", counted)

    def views(layers):
        made.clear()
        net = pax.Sequential(*[pax.Linear(2, 2) for _ in range(layers)])
        net.apply(lambda m: pax.apply_mp_policy(m, FHF))(jnp.ones((1, 2)))
        return len(made)

    once, twice, thrice = views(5), views(10), views(15)
    assert thrice - twice == twice - once > 0
