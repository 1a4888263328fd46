"""Params of every kind, and giving them other values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import pax_export as pax
from pax_export.errors import UnsupportedDtypeError
from pax_export.export.orbax import JaxModule
from tests.closeness import assert_close
from tests.export.orbax.models import KEY, X, call, linear, module, params, values
from tests.refusals import refused


@dataclasses.dataclass
class Layer:
    """A module as equinox has them: a function is a leaf of it."""

    weight: jax.Array
    activation: object


jax.tree_util.register_dataclass(Layer, ["weight", "activation"], [])


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux, parts):
        return cls(*parts)


def flax_model():
    linen = pytest.importorskip("flax.linen")
    net = linen.Dense(2)
    variables = net.init(jax.random.key(0), X)
    return variables, net.apply, {"params.kernel", "params.bias"}


def haiku_model():
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([2], name="net")(x)))
    return net.init(jax.random.key(0), X), net.apply, {"net/_/linear_0.w", "net/_/linear_0.b"}


def equinox_model():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    names = {f"layers.{place}.{kind}" for place in (0, 1) for kind in ("weight", "bias")}
    return net, lambda net, x: jax.vmap(net)(x), names


def pax_model():
    net = pax.purecall(pax.Sequential(pax.Linear(3, 2), jax.nn.relu), X)[0]
    names = {f"modules.0.{kind}" for kind in ("weight", "bias")}
    return net, lambda net, x: net(x), names


KINDS = {
    "flax": flax_model,
    "haiku": haiku_model,
    "equinox": equinox_model,
    "pax": pax_model,
    "with a function": lambda: (
        Layer(jnp.ones((3, 2)), jnp.tanh),
        lambda p, x: p.activation(x @ p.weight),
        {"weight"},
    ),
    "without keys": lambda: (
        WithoutKeys(jnp.ones((3, 2)), [jnp.ones(2)]),
        lambda p, x: x @ p.parts[0] + p.parts[1][0],
        {"0", "1.0"},
    ),
    "bare": lambda: (jnp.ones((3, 2)), lambda w, x: x @ w, {"params"}),
    "dict": lambda: (params(), linear, {"w", "b"}),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_pytree(kind):
    given, function, names = kind()
    made = module(function, params=given)
    found = {variable.name.removesuffix(":0") for variable in made.variables}
    assert names <= found
    assert_close(call(made), function(given, X), rtol=1e-5, atol=1e-6)
    twice = jax.tree_util.tree_map(lambda x: 2 * x if hasattr(x, "shape") else x, given)
    made.update_variables(twice)
    assert_close(call(made), function(twice, X), rtol=1e-5, atol=1e-6)
    assert_close(made.jax_methods[KEY](X), function(twice, X), rtol=1e-5)


def test_a_function_in_the_params_is_part_of_the_export():
    layer = Layer(jnp.ones((3, 2)), jnp.tanh)
    made = module(lambda p, x: p.activation(x @ p.weight), params=layer)
    with pytest.raises(ValueError):
        made.update_variables(Layer(jnp.ones((3, 2)), jnp.sin))


def test_numbers_and_keys_of_jax():
    given = {"scale": 2.0, "steps": 3, "key": jax.random.key(1), "w": jnp.ones(3, jnp.bfloat16)}

    def function(params, x):
        noise = jax.random.uniform(params["key"], x.shape)
        return {"y": params["w"] * params["scale"], "z": x * params["steps"] + noise}

    made = module(function, params=given)
    found, expected = call(made), function(given, X)
    assert_close(found["z"], expected["z"], rtol=1e-6)
    assert found["y"].dtype == expected["y"].dtype == jnp.bfloat16  # numbers have no dtype
    made.update_variables({**given, "scale": 3.0, "key": jax.random.key(2)})
    assert float(call(made)["y"][0]) == 3.0


def test_numbers_of_64_bits_come_as_jax_takes_them():
    given = {"a": np.array(5.0), "n": np.arange(3)}
    made = module(lambda p, x: x * p["a"] + p["n"], params=given)
    assert_close(call(made), X * 5 + np.arange(3))
    made.update_variables({"a": np.array(6.0), "n": np.arange(3)})
    assert values(made)["a:0"] == 6
    with pytest.raises(UnsupportedDtypeError):
        module(params={"n": np.array([2**40 + 5])})


def test_descriptions_are_no_params():
    with pytest.raises(UnsupportedDtypeError):
        module(params={"w": jax.ShapeDtypeStruct((3, 2), "float32")})


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            {"w": jnp.ones((3, 2))},
            "The PyTree structure of the updated parameters must be the same as that of the "
            "original parameters",
        ),
        ({"w": jnp.zeros((3, 2)), "b": jnp.ones(3)}, "Shape mismatch"),
        ({"b": jnp.zeros(2), "w": jnp.ones((3, 2), jnp.int32)}, "Incompatible type conversion"),
        ({"b": jnp.zeros(2), "w": "text"}, "Incompatible type conversion"),
    ],
)
def test_a_refused_update_changes_nothing(new, words):
    made = module()
    before = values(made)
    with refused(ValueError, words):
        made.update_variables(new)
    np.testing.assert_equal(values(made), before)
    assert_close(made.jax_methods[KEY](X), linear(params(), X))


def test_an_update_makes_no_variables(monkeypatch):
    made = module()
    monkeypatch.setattr(tf, "Variable", None)
    made.update_variables(jax.tree_util.tree_map(lambda x: 2 * x, params()))
    assert_close(call(made), 2 * linear(params(), X))


def test_the_old_params_are_let_go():
    given = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    made = module(params=given)
    call(made)
    import gc
    import weakref

    old = weakref.ref(given["w"])
    made.update_variables(params())
    del given
    gc.collect()
    assert old() is None


def test_tied_arrays_are_one_variable_until_they_differ():
    w = jnp.ones((3, 3))
    made = module(lambda p, x: x @ p["in"] @ p["out"], params={"in": w, "out": w})
    assert len(made.variables) == 1
    new = jnp.full((3, 3), 2.0)
    made.update_variables({"in": new, "out": new + 0})
    assert len(made.variables) == 1
    assert_close(call(made), X @ new @ new)
    made.update_variables({"in": new, "out": w})
    assert len(made.variables) == 2
    assert_close(call(made), X @ new @ w)


def test_one_array_that_is_trained_at_one_place_only():
    w = jnp.ones((3, 3))
    made = module(
        lambda p, x: x @ p["in"] @ p["out"],
        params={"in": w, "out": w},
        trainable={"in": True, "out": False},
    )
    assert len(made.variables) == 2
    assert [variable.name for variable in made.trainable_variables] == ["in:0"]


def test_a_node_with_names_of_its_own():
    @jax.tree_util.register_pytree_with_keys_class
    class Odd:
        def __init__(self, value):
            self.value = value

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("value"), self.value)], None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(children[0])

    made = JaxModule(Odd(jnp.ones(2)), lambda p, x: x)
    assert [variable.name for variable in made.variables] == ["value:0"]
