"""Layers, nets and training on the meshes that jax makes by default, whose axes are Explicit."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pax_export as pax
from pax_export.errors import ShardingError
from tests.closeness import assert_close
from tests.contract.table import ROWS, each
from tests.hard.size import IN_LONG_RUNS

# How a batch lies, and which axis of a weight is split: none, the first that can be, or the last.
WAYS = {
    "data parallel": (P("data"), None),
    "fully sharded": (P(("data", "model")), "first"),
    "tensor parallel": (P("data"), "last"),
}
# One form of each layer, in the way that splits most; all of them in every way in long runs.
SHORT = {re.split("[12]D|,", row.name)[0]: row for row in reversed(ROWS)}
# Their layers have rows of their own, and nets of them are trained below or generate.
NESTED = ("Transformer", "ResNet", "Sequential", "Decoder")
CASES = [
    pytest.param(row, way, id=f"{row.name}-{way}")
    for row in (ROWS if IN_LONG_RUNS else [SHORT[name] for name in SHORT if name not in NESTED])
    for way in (WAYS if IN_LONG_RUNS else ["tensor parallel"])
]


@pytest.fixture(scope="module")
def mesh():
    found = jax.make_mesh((4, 2), ("data", "model"))
    assert set(found.axis_types) == {AxisType.Explicit}
    return found


def spec_of_weight(leaf, order):
    """A spec that splits one axis over the two devices of `model`, if one can be split."""
    if order is None or jnp.issubdtype(leaf.dtype, jnp.integer):
        return P()
    axes = range(leaf.ndim) if order == "first" else reversed(range(leaf.ndim))
    for axis in axes:
        if leaf.shape[axis] % 2 == 0:
            return P(*(None,) * axis, "model")
    return P()


def placed(tree, mesh, order):
    return jax.tree.map(lambda leaf: put(leaf, mesh, spec_of_weight(leaf, order)), tree)


def put(x, mesh, spec):
    """The parts of an array of the host; jax would compile a program that takes one apart."""
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))


def placed_inputs(row, inputs, mesh, batch):
    return [
        put(x, mesh, batch if shape.startswith("b") else P())
        for x, shape in zip(inputs, row.symbolic)
    ]


def assert_trees_near(actual, expected, loss=1.0):
    """Compares leaves to a ten thousandth of the largest number in each.

    A gradient that is zero is zero but for the rounding of a loss of this size.
    """
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, rtol=1e-4, atol=max(1e-4, 1e-6 * abs(float(loss))))


def built(row):
    """A net with weights and keys that numpy draws: for each of them jax compiles a program."""
    numbers = np.random.RandomState(7)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(numbers.randint(0, 4, leaf.shape).astype(leaf.dtype))
        return jnp.asarray(numbers.standard_normal(leaf.shape).astype(leaf.dtype) / 2)

    return jax.tree.map(draw, jax.eval_shape(row.build))


@functools.cache
def on_one_device(row):
    """A net with its inputs, a step, and what the step gives on one device."""
    net, inputs = built(row), row.inputs(b=8)

    def loss(params, net, *inputs):
        net, y = row.run(net.update_parameters(params), *inputs)
        return jnp.mean(y.astype(jnp.float32) ** 2), net

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return net, inputs, step, step(net.parameters(), net, *inputs)


@pytest.mark.parametrize(("row", "way"), CASES)
def test_loss_gradients_and_state_are_those_of_one_device(row, way, mesh):
    batch, order = WAYS[way]
    net, inputs, step, ((expected, updated), gradients) = on_one_device(row)
    net = placed(net, mesh, order)
    (found, after), slopes = step(net.parameters(), net, *placed_inputs(row, inputs, mesh, batch))
    assert_trees_near((found, after, slopes), (expected, updated, gradients), expected)
    # A second step takes what the first one gave: nothing has moved.
    for before, now in zip(jax.tree.leaves(net), jax.tree.leaves(after), strict=True):
        assert now.sharding.is_equivalent_to(before.sharding, before.ndim)


@each([row for row in ROWS if row.name in ("Linear", "Conv2D", "BatchNorm1D", "LSTM", "Embed")])
def test_without_jit(row, mesh):
    pax.seed_rng_key(7)
    net, inputs = row.build().eval(), row.inputs(b=8)
    expected = row.run(net, *inputs)[1]
    with jax.set_mesh(mesh):
        given = placed_inputs(row, inputs, mesh, P("data"))
        assert_trees_near(row.run(placed(net, mesh, "last"), *given)[1], expected)


def convnet():
    return pax.Sequential(
        pax.Conv2D(3, 8, 3), pax.BatchNorm2D(8), jax.nn.relu, lambda x: x.reshape(len(x), -1),
        pax.Linear(128, 4),
    )  # fmt: skip


NETS = {
    "transformer": (lambda: pax.nets.Transformer(8, 2, 2, 0.1), (8, 4, 8)),
    "convolutions": (convnet, (8, 4, 4, 3)),
    "dense": (lambda: pax.Sequential(pax.Linear(8, 16), jnp.tanh, pax.Linear(16, 8)), (8, 8)),
}


def loss_fn(net, x):
    net, y = net % x
    loss = jnp.mean((y - 1) ** 2)
    return loss, (loss, net)


@functools.cache
def trained_on_one_device(name):
    """A net, its optimizer, a batch, a step, and the loss of three steps on one device."""
    make, shape = NETS[name]
    pax.seed_rng_key(7)
    net = make()
    optimizer = pax.optim.from_optax(optax.sgd(1e-2, momentum=0.9))(net.parameters())
    x = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
    step = jax.jit(pax.build_update_fn(loss_fn))
    losses, now = [], (net, optimizer)
    for _ in range(3):
        *now, loss = step(*now, x)
        losses.append(loss)
    return net, optimizer, x, step, losses


TRAINED = list(itertools.product(NETS, WAYS) if IN_LONG_RUNS else zip(NETS, WAYS))


@pytest.mark.parametrize(("name", "way"), TRAINED)
def test_training_with_build_update_fn(name, way, mesh):
    batch, order = WAYS[way]
    net, optimizer, x, step, losses = trained_on_one_device(name)
    many = placed_first = placed(net, mesh, order), placed(optimizer, mesh, order)
    xs = jax.device_put(x, NamedSharding(mesh, batch))
    for expected in losses:
        *many, loss = step(*many, xs)
        assert_trees_near(loss, expected)
    # Everything stays where it lies.
    for leaf, before in zip(jax.tree.leaves(many), jax.tree.leaves(placed_first), strict=True):
        assert leaf.sharding.is_equivalent_to(before.sharding, before.ndim)


def test_a_function_that_cannot_lie_anywhere_is_asked_for_in_our_words(mesh):
    rows, columns = (
        jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(*spec)))
        for spec in (("data",), (None, "data"))
    )

    def add(x, y):
        if jax.typeof(x).sharding.mesh.axis_types[0] == AxisType.Auto:
            raise ValueError("a function that will not be run on Auto axes")
        return x + y

    with pytest.raises(ShardingError) as error:
        jax.jit(pax.Lambda(add))(rows, columns)
    text = str(error.value)
    assert text.startswith(
        "jax cannot infer the sharding of the function's result on Explicit axes."
    )
    assert "fix: jax.sharding.reshard(x, P('data')) of its arguments" in text


def test_a_mistake_in_a_function_stays_what_it_is(mesh):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data")))
    with pytest.raises(ZeroDivisionError):
        jax.jit(pax.Lambda(lambda x: x * (1 // 0)))(x)


class Head(pax.ParameterModule):
    """A layer of a user's own, which multiplies as plain jax does."""

    def __init__(self, how):
        super().__init__()
        self.how, self.w = how, jnp.ones((8, 8))

    def __call__(self, x):
        return HOWS[self.how](x, self.w)


HOWS = {
    "ambiguous product": lambda x, w: x @ w,
    "product of split by split": lambda x, w: jnp.dot(x, w),
    "select": lambda x, w: jnp.where(x > 0, x, w),
    "sum of two shardings": lambda x, w: x + w,
}
SPECS = {
    "ambiguous product": (P(None, "data"), P("data", None)),
    "product of split by split": (P("data", None), P(None, "data")),
    "select": (P("data", None), P(None, "data")),
    "sum of two shardings": (P("data", None), P(None, "data")),
}


@pytest.mark.parametrize("how", HOWS)
def test_jaxs_message_about_a_users_own_module_has_its_path(how, mesh):
    lies, weight_lies = SPECS[how]
    net = pax.Sequential(pax.Identity(), Head(how))
    head = net[1].replace(w=jax.device_put(net[1].w, NamedSharding(mesh, weight_lies)))
    net = net.replace_node(net[1], head)
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, lies))
    with pytest.raises(Exception, match="(?i)shard|unreduced") as error:
        jax.jit(lambda net, x: net % x)(net, x)
    assert error.value.__notes__[0] == "in the call of modules.1 (Head) in Sequential"  # then jax's
