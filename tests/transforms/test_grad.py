"""grad and value_and_grad: values, structures, arguments, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_structure

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused

BOTH = pytest.mark.parametrize("transform", [pax.grad, pax.value_and_grad])


class Scaled(pax.Module):
    """A trainable array, a state, an integer, and a layer."""

    parameters = pax.parameters_method("scale")

    def __init__(self):
        super().__init__()
        self.scale = jnp.array(2.0)
        self.calls = jnp.array(0)
        self.mean = jnp.zeros(3)
        self.layer = pax.Linear(2, 3)

    def __call__(self, x):
        self.calls = self.calls + 1
        self.mean = self.layer(x).mean(0)
        return self.layer(x) * self.scale


def loss_fn(model, x):
    return jnp.sum((model.layer(x) * model.scale) ** 2)


def loss_and_aux(model, x):
    model, y = model % x
    return jnp.sum(y**2), (model, x)


x = jnp.arange(8.0).reshape(4, 2)


def assert_equal(a, b):
    jax.tree_util.tree_map(np.testing.assert_array_equal, a, b)


def reference(model, x):
    """The gradient by jax alone, of plain arrays."""

    def loss(weight, bias, scale):
        return jnp.sum(((x @ weight + bias) * scale) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(model.layer.weight, model.layer.bias, model.scale)


def test_values():
    model = Scaled()
    value, grads = pax.value_and_grad(loss_fn)(model, x)
    expected, (weight, bias, scale) = reference(model, x)
    assert_close(value, expected, rtol=1e-5)
    assert_close(grads.layer.weight, weight, rtol=1e-5)
    assert_close(grads.layer.bias, bias, rtol=1e-5)
    assert_close(grads.scale, scale, rtol=1e-5)
    assert_equal(pax.grad(loss_fn)(model, x), grads)


def test_the_structure_is_that_of_parameters():
    model = pax.Sequential(pax.Linear(2, 2), pax.freeze_parameters(pax.Linear(2, 2)), Scaled())
    grads = pax.grad(lambda model, x: jnp.sum(model.eval()[0](x)))(model, x)
    assert tree_structure(grads) == tree_structure(model.parameters())
    assert grads[1].weight == pax.EmptyNode() == grads[2].mean


def test_aux():
    model = Scaled()
    grads, (new, same) = pax.grad(loss_and_aux, has_aux=True)(model, x)
    assert int(new.calls) == 1 and int(model.calls) == 0
    assert_equal(same, x)
    (value, (again, _)), same_grads = pax.value_and_grad(loss_and_aux, True)(model, x)  # as in PAX
    assert value.shape == () and tree_structure(again) == tree_structure(model)
    assert_equal(grads, same_grads)


def test_the_module_inside_has_all_its_arrays():
    model, inside = Scaled(), []

    def loss(model, x):
        inside.append(model)
        return loss_fn(model, x)

    pax.grad(loss)(model, x)
    assert tree_structure(inside[0]) == tree_structure(model)
    assert inside[0].calls is model.calls


def test_other_arguments():
    def loss(model, a, b, *, c):
        return model.scale * jnp.sum(a * b["module"].scale * b["array"]) * c

    one, two = Scaled(), Scaled()
    args, kwargs = (one, x, {"module": two, "array": x + 1}), {"c": 3.0}
    array = pax.grad(loss, argnums=1)(*args, **kwargs)
    assert array.shape == x.shape
    both = pax.grad(loss, argnums=(0, -1))(*args, **kwargs)
    assert isinstance(both, tuple)
    assert tree_structure(both[0]) == tree_structure(one.parameters())
    assert tree_structure(both[1]["module"]) == tree_structure(two.parameters())
    assert both[1]["array"].shape == x.shape
    assert_close(both[0].scale, both[1]["module"].scale)
    assert_equal(
        both[1]["array"], jax.grad(lambda b: loss(one, x, {**args[2], "array": b}, c=3.0))(x + 1)
    )
    (only,) = pax.grad(loss, argnums=(0,))(*args, **kwargs)
    assert_equal(only, both[0])


def test_one_module_passed_twice_has_two_gradients_that_add_up():
    layer = pax.Linear(2, 2)

    def loss(a, b, x):
        return jnp.sum(jnp.tanh(b(jnp.tanh(a(x)))))

    first, second = pax.grad(loss, (0, 1))(layer, layer, x)
    tied = pax.grad(lambda layer, x: loss(layer, layer, x))(layer, x)
    total = first.map(jnp.add, second)
    assert_close(total.weight, tied.weight, rtol=1e-5)


def test_a_changed_leaf_is_traced_once_and_under_jit():
    traces = []

    def loss(model, x):
        traces.append(x)
        return loss_fn(model, x)

    step = jax.jit(pax.grad(loss))
    model = Scaled()
    step(model, x), step(model.map(lambda leaf: leaf + 1), x)
    assert len(traces) == 1


class Integer(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.table = jnp.array([1, 2])
        self.scale = jnp.array(1.0)


@BOTH
def test_an_integer_parameter_is_named(transform):
    model = pax.Sequential(pax.Linear(1, 1), Integer())
    with refused(TypeError, where="modules.1.table", got="int32[2]"):
        transform(lambda model: model[1].scale)(model)


def test_an_integer_argument_is_named():
    with refused(TypeError, "argument 1"):
        pax.grad(lambda model, n: model.scale * n, argnums=1)(Scaled(), 3)


def test_integers_may_be_allowed():
    grads = pax.grad(lambda model: model.scale * 2, allow_int=True)(Integer())
    assert grads.table.dtype == jax.dtypes.float0 and float(grads.scale) == 2


def test_holomorphic():
    class Complex(pax.ParameterModule):
        def __init__(self):
            super().__init__()
            self.z = jnp.array(1j)

    grads = pax.grad(lambda model: model.z**2, holomorphic=True)(Complex())
    assert complex(grads.z) == 2j


@BOTH
@pytest.mark.parametrize("wrong", [jnp.ones(2), 3.0, None, [3.0]])
def test_the_first_argument_must_be_a_module(transform, wrong):
    with refused(ValueError, got=f"{type(wrong).__name__}: {wrong!r}") as error:
        transform(lambda model: model)(wrong)
    assert isinstance(error.value, TypeError)


@BOTH
def test_a_missing_argument(transform):
    with refused(ValueError, got="argnums=0 and 0 positional arguments"):
        transform(loss_fn)(model=Scaled(), x=x)


@BOTH
def test_the_name_of_the_function_is_kept(transform):
    assert transform(loss_fn).__name__ == "loss_fn"


@BOTH
def test_a_path_of_wrt_must_select_a_leaf(transform):
    net = pax.Sequential(pax.Linear(2, 2), pax.Linear(2, 2))
    with refused(ValueError, "modules.1", where="grad(wrt=...)", got="'modules.2'"):
        transform(lambda net: net(x).sum(), wrt="modules.2")(net)
