"""Sequential and Lambda."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused


def test_applies_layers_in_order():
    net = pax.Sequential(pax.Linear(2, 3), jnp.tanh, pax.Linear(3, 1))
    x = jnp.ones((4, 2))
    expected = jnp.tanh(x @ net[0].weight + net[0].bias) @ net[2].weight + net[2].bias
    assert_close(net(x), expected, rtol=1e-6)
    assert pax.Sequential()(x) is x


def test_indexing():
    net = pax.Sequential(pax.Linear(1, 1), jax.nn.relu, pax.Identity())
    assert isinstance(net.modules, tuple)
    assert net[-1] is net[2] is net.modules[2]
    assert net[1:] == net.modules[1:]
    assert [layer is other for layer, other in zip(net, net.modules)] == [True] * 3
    assert isinstance(net[1], pax.Lambda)
    with pytest.raises(IndexError):
        net[3]
    with pytest.raises(TypeError):
        len(net)


def test_setting_a_layer():
    net = pax.Sequential(pax.Linear(1, 1), jax.nn.relu, name="net")
    new = net.set(-1, jnp.tanh)
    assert new[1].func is jnp.tanh and net[1].func is jax.nn.relu
    assert new[0].weight is net[0].weight and new.name == "net"
    with pytest.raises(IndexError):
        net.set(2, jnp.tanh)
    with refused(ValueError, "paths"):
        net.set(1, net[0])


def test_appending_keeps_class_name_and_mode():
    class Special(pax.Sequential):
        pass

    net = Special(pax.Linear(1, 2), name="net").eval() >> jax.nn.relu >> pax.Linear(2, 1)
    assert type(net) is Special and net.name == "net" and not net.training
    assert [layer.training for layer in net] == [False, False, True]
    assert (pax.Sequential() >> jnp.tanh)[0].training
    longer = net >> jnp.tanh
    assert len(longer.modules) == 4 and len(net.modules) == 3


def test_printing():
    net = pax.Sequential(pax.Linear(4, 4), pax.Sequential(jnp.tanh), name="net")
    assert repr(net) == "(net) Sequential(parameters=20, mode=train)"
    assert net.summary().splitlines() == [
        "(net) Sequential",
        "├── modules.0: Linear(in_dim=4, out_dim=4, with_bias=True)",
        "└── modules.1: Sequential",
        "    └── modules.0: x => tanh(x)",
    ]


def test_state_dict_names():
    net = pax.Sequential(pax.Linear(2, 3), pax.BatchNorm1D(3), jax.nn.relu)
    names = jax.tree_util.tree_map(lambda x: None, net.state_dict())
    ema = {"averages": None, "debias": None}
    assert names == {
        "modules": (
            {"weight": None, "bias": None},
            {"scale": None, "offset": None, "ema_mean": ema, "ema_var": ema},
            {},
        )
    }


# --- lambda --------------------------------------------------------------------------


def shifted(x, by=1.0):
    return x + by


class Doubler:
    def __call__(self, x):
        return 2 * x


class Named(Doubler):
    def __repr__(self):
        return "double"


def test_calls_the_function_with_all_arguments():
    assert pax.Lambda(shifted)(1.0, by=2.0) == 3.0
    assert pax.Lambda(lambda *args: args)(1, 2) == (1, 2)


@pytest.mark.parametrize(("func", "name"), [
    (jax.nn.relu, "relu"),
    (jax.nn.gelu, "gelu"),
    (jnp.tanh, "tanh"),
    (jnp.add, "add"),
    (jax.lax.add, "add"),
    (jax.jit(shifted), "shifted"),
    (jax.custom_jvp(shifted), "shifted"),
    (lambda x: x, "<lambda>"),
    (abs, "abs"),
    (Doubler, "Doubler"),
    (Doubler(), "Doubler"),
    (Named(), "double"),
    (functools.partial(shifted, by=2), "functools.partial(shifted, by=2)"),
    (functools.partial(jax.nn.relu), "functools.partial(relu)"),
    (functools.partial(max, Doubler(), key=abs), "functools.partial(max, Doubler, key=abs)"),
])  # fmt: skip
def test_printing_of_lambda(func, name):
    """Never an address in memory."""
    layer = pax.Lambda(func)
    assert repr(layer) == f"Lambda({name})"
    assert layer.summary() == f"x => {name}(x)"
    assert layer.summary(return_list=True) == [f"x => {name}(x)"]
    given = pax.Lambda(func, name="activation")
    assert repr(given) == "(activation) Lambda"
    assert given.summary() == "x => activation(x)"


def test_printing_of_a_policy():
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    layer = pax.apply_mp_policy(pax.Lambda(jax.nn.relu), policy)
    assert repr(layer) == "Lambda(relu, mp_policy=FHF)"
    assert layer.summary() == "x => relu(x)  (mp_policy=FHF)"


@pytest.mark.parametrize(
    ("value", "got"),
    [(3, "int: 3"), ("relu", "str: 'relu'"), ([abs], "list: "), (pax.Dropout, "Dropout")],
)
def test_other_values_are_refused(value, got):
    with refused(TypeError, got, where="Lambda"):
        pax.Sequential(pax.Linear(2, 2), value)


def test_identity():
    x = object()
    assert pax.Identity()(x) is x
    assert repr(pax.Identity(name="skip")) == "(skip) Identity(parameters=0, mode=train)"
    assert pax.Identity(training=False).training is False
