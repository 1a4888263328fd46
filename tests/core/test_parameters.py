"""Trainable parameters, freezing, merging."""

import pickle

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest
from jax.tree_util import tree_structure

import pax_export as pax
from pax_export.core import named_leaves, named_roles, warn_of_untrained
from pax_export.errors import InvalidArgumentError
from tests.core.models import Counter, Dense, Net
from tests.refusals import refused

empty = pax.EmptyNode()
FULL = jmp.get_policy("p=f32,c=f32,o=f32")


def test_trainable_dtypes():
    params = Net().parameters()
    assert type(params) is Net
    assert params.scale == empty
    assert params.layers[0].weight.shape == (2, 2)
    assert params.parts["b"].count == empty
    assert params.mixed[0].bias.shape == (1,) and params.mixed[1] == 5
    assert params.parameters() == params


class Named(pax.Module):
    parameters = pax.parameters_method("a b", "pair", "layer", "nothing")

    def __init__(self):
        self.a, self.b, self.c = jnp.ones(1), jnp.ones(1), jnp.ones(1)
        self.pair = [jnp.ones(1), jnp.ones(1)]
        self.other = [jnp.ones(1), jnp.ones(1)]
        self.layer = Counter()
        self.dense = Dense()
        self.nothing = None


def test_parameters_method():
    params = Named().parameters()
    assert params.a.shape == params.b.shape == (1,)
    assert params.c == empty and params.other == [empty, empty]
    assert len(jax.tree_util.tree_leaves(params.pair)) == 2
    assert params.dense.weight.shape == (2, 3)
    # A named submodule keeps its parameters, not its states (D64).
    assert params.layer.count == empty


def test_parameters_method_without_submodules():
    class Alone(Named):
        parameters = pax.parameters_method("a", submodules=False)

    params = Alone().parameters()
    assert params.dense == empty and params.layer == empty


def test_parameters_method_with_a_wrong_name():
    class Wrong(pax.Module):
        parameters = pax.parameters_method("wieght")

        def __init__(self):
            self.weight = jnp.ones(1)

    for module in (Wrong(), Wrong().eval()):
        with refused(AssertionError, got="the attributes _name, _training, weight"):
            module.parameters()


def test_a_class_may_write_parameters_itself():
    class Half(pax.ParameterModule):
        def __init__(self):
            self.a, self.b = jnp.ones(1), jnp.ones(1)
            self.child = Dense()

        def parameters(self):
            assert isinstance(self.a, (jax.Array, pax.EmptyNode))
            return super().parameters().replace(b=pax.EmptyNode())

    params = pax.Module().set_attribute("half", Half()).parameters()
    assert params.half.a.shape == (1,) and params.half.b == empty
    assert params.half.child.weight.shape == (2, 3)


def test_update_parameters():
    net = Net()
    doubled = net.map(lambda x: x * 2)
    updated = net.update_parameters(doubled)
    assert updated.layers[0].weight is doubled.layers[0].weight
    assert updated.scale is net.scale
    assert pax.update_parameters(net, params=doubled.parameters()) == updated
    with refused(ValueError, "against"):
        net.update_parameters(doubled.eval())


def test_merging():
    net = Net()
    assert net | net.parameters() == net
    assert net.parameters() | net == net
    assert ~net == net.parameters()
    hole = pax.Module().set_attribute("child", empty)
    full = pax.Module().set_attribute("child", Dense())
    assert (full | hole) == full and (hole | full) == full
    with refused(ValueError, got="din: 2 against 9"):
        Dense() | Dense().replace(din=9)
    with pytest.raises(TypeError):
        net | 3


def test_freezing():
    net = Net()
    frozen = pax.freeze_parameters(net)
    assert jax.tree_util.tree_leaves(frozen.parameters()) == []
    assert frozen != net and isinstance(frozen, Net)
    assert frozen.summary() == net.summary()
    assert type(frozen) is type(pax.freeze_parameters(frozen))
    assert tree_structure(frozen) == tree_structure(pax.freeze_parameters(Net()))
    for kept in (frozen.eval().train(), frozen.replace(kind="x"), frozen.copy()):
        assert jax.tree_util.tree_leaves(kept.parameters()) == []
    assert pax.unfreeze_parameters(frozen, origin=net) == net
    with refused(ValueError, "where the origin has"):
        pax.unfreeze_parameters(frozen, origin=Dense())


class Masked(pax.ParameterModule):
    """It says itself what is trained."""

    def __init__(self):
        self.a, self.b, self.child = jnp.ones(1), jnp.ones(1), Dense()

    def parameters(self):
        return super().parameters().replace(b=empty)


def test_freezing_is_data_and_keeps_the_class():
    for net in (Dense(), Masked(), pax.Sequential(Masked())):
        frozen = pax.freeze_parameters(net)
        assert type(frozen) is type(net) and frozen != net
        assert jax.tree_util.tree_leaves(frozen.parameters()) == []
        assert jax.tree_util.tree_leaves(pax.apply_mp_policy(frozen, FULL).parameters()) == []
        thawed = frozen.at(lambda part: True).unfreeze()
        assert thawed == net and vars(thawed).keys() == vars(net).keys()
        assert pickle.loads(pickle.dumps(frozen)).parameters() == frozen.parameters()


def test_single_arrays_of_a_class_with_parameters_of_its_own():
    net = pax.Sequential(Masked())
    held = net.at(["modules.0.a", "modules.0.child.bias"]).freeze()
    assert [name for name, _ in named_leaves(held.parameters())] == ["modules.0.child.weight"]
    roles = {path: role for path, _, role in named_roles(held)}
    assert [roles[f"modules.0.{name}"] for name in ("a", "b", "child.weight", "child.bias")] == [
        "frozen", "state", "trainable", "frozen",
    ]  # fmt: skip
    slotted = net[0].replace_method(parameters=lambda self: self.replace(b=empty))
    assert jax.tree_util.tree_leaves(pax.freeze_parameters(slotted).parameters()) == []


def test_modes():
    net = Net()
    off = net.eval()
    assert not any(m.training for m in (off, *off.submodules()))
    assert off.train() == net
    assert pax.enable_train_mode(pax.enable_eval_mode(net)) == net


class Classifier(pax.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = pax.Sequential(pax.Linear(8, 512), pax.BatchNorm1D(512))
        self.head = pax.Linear(512, classes)


def test_unfreezing_with_the_origin_before_another_head_is_refused():
    net = Classifier(3)
    frozen = pax.freeze_parameters(net).replace(head=pax.Linear(512, 10))
    with refused(
        InvalidArgumentError, where="head.weight",
        got="head.weight (512, 10) where the origin has head.weight (512, 3)",
    ):  # fmt: skip
        pax.unfreeze_parameters(frozen, origin=net)
    frozen = pax.freeze_parameters(net).replace(head=pax.Linear(512, 3, with_bias=False))
    with refused(InvalidArgumentError, "nothing where the origin has head.bias"):
        pax.unfreeze_parameters(frozen, origin=net)
    swapped = (
        pax.freeze_parameters(net)
        .set_attribute("tail", jnp.ones(3))
        .replace(head=pax.Linear(512, 3, with_bias=False))
    )
    with refused(InvalidArgumentError, "where the origin has head.bias"):
        pax.unfreeze_parameters(swapped, origin=net)
    again = pax.unfreeze_parameters(pax.freeze_parameters(net), origin=net)
    assert again == net


def test_frozen_states_stay_as_they_are_in_train_mode_too():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    norm = pax.BatchNorm1D(4)

    def moved(layer):
        after, _ = layer.train() % x
        before, now = (jax.tree_util.tree_leaves(m) for m in (layer, after))
        return any((a != b).any() for a, b in zip(before, now))

    assert moved(norm) and moved(pax.freeze_parameters(norm))
    frozen = pax.freeze_parameters(norm, states=True)
    assert not moved(frozen) and not frozen.train().training
    assert not moved(pax.freeze_parameters(frozen))  # frozen again, it stays so
    assert not moved(pickle.loads(pickle.dumps(frozen)))
    net = pax.Sequential(frozen, pax.Dropout(0.5)).train()
    assert [m.training for m in (net, net[0], net[1])] == [True, False, True]
    assert type(frozen) is type(pax.freeze_parameters(pax.BatchNorm1D(4), states=True))
    back = pax.unfreeze_parameters(frozen, origin=norm)
    assert back == norm and moved(back)
    half = pax.apply_mp_policy(frozen, jmp.get_policy("p=f32,c=f32,o=f32"))
    assert not half.train().training


def plain(name="Scaled", base=pax.Module, **namespace):
    """A class of its own for each test: a class is warned of once."""

    def __init__(self):
        base.__init__(self)
        self.linear = pax.Linear(2, 2)
        self.scale, self.offsets = jnp.ones(2), [jnp.zeros(2)]
        self.count, self.key = jnp.array(0), jax.random.key(0)

    def __call__(self, x):
        return self.linear(x) * self.scale + self.offsets[0]

    return type(base)(name, (base,), {"__init__": __init__, "__call__": __call__} | namespace)


def loss_of(net, x=None):
    loss = net(jnp.ones((1, 2))).sum()
    return loss, (loss, net)


def sgd(params):
    return pax.optim.from_optax(optax.sgd(1.0))(params)


USES = {
    "grad": lambda net: pax.grad(loss_of, has_aux=True)(net),
    "value_and_grad": lambda net: pax.value_and_grad(loss_of, has_aux=True)(net),
    "build_update_fn": lambda net: pax.build_update_fn(loss_of)(net, sgd(net.parameters())),
    "jit": lambda net: jax.jit(pax.build_update_fn(loss_of))(net, sgd(net.parameters())),
    "apply_gradients": lambda net: pax.optim.apply_gradients(
        net, sgd(net.parameters()), net.parameters()
    ),
    "optimizer": lambda net: sgd(net),
}


@pytest.mark.parametrize("use", USES)
def test_floating_arrays_of_which_nothing_says_whether_they_are_trained(use):
    net = pax.Sequential(plain()(), plain("Other", parameters=pax.parameters_method("scale"))())
    with pytest.warns(pax.errors.UntrainedArrayWarning) as found:
        USES[use](net)
    (text,) = [str(each.message) for each in found]
    assert "Sequential: modules.0.scale, modules.0.offsets" in text and "Other" not in text
    assert "class Scaled(pax.ParameterModule)" in text
    assert 'parameters = pax.parameters_method("scale offsets")' in text
    assert "class Scaled(pax.StateModule)" in text
    USES[use](net)  # once: a warning would be an error here


DECLARED = {
    "state": {"base": pax.StateModule},
    "no name": {"parameters": pax.parameters_method()},
    "code": {"parameters": lambda self: self.replace(scale=empty, offsets=[empty], count=empty)},
}


@pytest.mark.parametrize("how", DECLARED)
def test_classes_that_declare_their_leaves_are_left_alone(how):
    warn_of_untrained(plain(**DECLARED[how])())


def test_arrays_that_are_frozen_averaged_or_chosen_are_left_alone():
    net = plain()()
    warn_of_untrained(pax.freeze_parameters(net))
    warn_of_untrained(net.at(["scale", "offsets.0"]).freeze())
    warn_of_untrained(pax.EMA(net, 0.9, allow_int=True))  # a copy of which nothing is trained
    warn_of_untrained(net.parameters())
    pax.grad(loss_of, has_aux=True, wrt=pax.transforms.PathContains("scale"))(net)


def test_layers_of_one_class_are_named_once_whatever_is_derived_from_it():
    cls = plain()
    net = pax.precision.mixed_precision(pax.Sequential(cls(), cls()), jmp.get_policy("f32"))
    with pytest.warns(pax.errors.UntrainedArrayWarning) as found:
        warn_of_untrained(net)
    assert len(found) == 1
    warn_of_untrained(cls())
