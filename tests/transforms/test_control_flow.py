"""Loops and branches of modules, beside Python's own; pax.scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.refusals import refused
from tests.transforms.models import Block, assert_same, assert_trees_close, batch

x = batch(3, 4)


class Net(pax.Module):
    """Calls its blocks as a function of the test says."""

    def __init__(self, call):
        super().__init__()
        self.a, self.b, self.call = Block(4), Block(4), call

    def __call__(self, x, *args):
        return self.call(self, x, *args)

    def both(self, x):
        return self.b(self.a(x))

    def step(self, value):
        return self.a(value[0]), value[1] + 1

    def goes_on(self, value):
        return value[1] < 3

    def unchanged(self, x):
        return x


def run(call, *args, seed=0):
    pax.seed_rng_key(seed)
    return Net(call) % (x, *args)


def same_run(call, expected, *args):
    """Both leave the same state, keys included, and give the same output, also under jit."""
    pax.seed_rng_key(0)
    net = Net(call)
    for got in (net % (x, *args), jax.jit(pax.purecall)(net, x, *args)):
        assert_trees_close(
            (got[0].a, got[0].b, got[1]), (lambda n, y: (n.a, n.b, y))(*run(expected, *args))
        )


BRANCHES = {
    0: lambda net, x: net.a(x),
    1: lambda net, x: net.both(x),
    2: lambda net, x: x,
}
CONDITIONS = {
    "operands": lambda net, x, i: T.cond(
        i == 0, lambda a, b, x: a(x), lambda a, b, x: b(a(x)), net.a, net.b, x
    ),
    "the whole": lambda net, x, i: T.cond(i == 0, BRANCHES[0], BRANCHES[1], net, x),
    "a module and a method": lambda net, x, i: T.cond(i == 0, net.a, net.both, x),
    "methods": lambda net, x, i: T.switch(i, [net.a, net.both, net.unchanged], x),
    "functions": lambda net, x, i: T.switch(i, list(BRANCHES.values()), net, x),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("call", CONDITIONS.values(), ids=CONDITIONS)
def test_branches_change_their_modules(call, index):
    same_run(call, lambda net, x, i: BRANCHES[index](net, x), index)


def test_branches_of_which_none_changes_keep_the_arrays():
    def call(net, x):
        weight = net.a.linear.weight
        y = T.switch(2, list(BRANCHES.values()), net, x)
        assert net.a.linear.weight is weight
        return y

    run(call)


def thrice(net, x):
    for _ in range(3):
        x = net.a(x)
    return x


def step(value):
    net, x, count = value
    return net, net.a(x), count + 1


LOOPS = {
    "while": lambda net, x: T.while_loop(lambda value: value[2] < 3, step, (net, x, 0))[1],
    "while, by methods": lambda net, x: T.while_loop(net.goes_on, net.step, (x, 0))[0],
    "fori": lambda net, x: T.fori_loop(0, 3, lambda i, value: step(value), (net, x, 0))[1],
    "fori, open bounds": lambda net, x: T.fori_loop(
        2, jnp.int32(5), lambda i, value: step(value), (net, x, 0)
    )[1],
    "scan": lambda net, x: T.scan(lambda value, _: (step(value), None))((net, x, 0), batch(3))[0][
        1
    ],
}


@pytest.mark.parametrize("call", LOOPS.values(), ids=LOOPS)
def test_loops_carry_their_modules(call):
    same_run(call, thrice)


def test_map_of_a_layer_passes_its_state_on():
    xs = batch(5, 3, 4)
    same_run(
        lambda net, _, xs: T.map(net.a, xs),
        lambda net, _, xs: jnp.stack([net.a(each) for each in xs]),
        xs,
    )
    layers = T.vmap(lambda: pax.Linear(4, 4), axis_size=5)()
    got = T.map(lambda value: value[0](value[1]), (layers, xs))
    assert_trees_close(got, T.vmap(lambda layer, x: layer(x))(layers, xs))


def test_what_is_returned_is_the_open_module_where_all_branches_return_it():
    def call(net, x):
        a, b = net.a, net.b
        same, (norm,) = T.cond(False, *[lambda net: (net.a, [net.a.bn])] * 2, net)
        assert same is a and norm is a.bn
        other = T.cond(False, lambda a, b: a, lambda a, b: b, a, b)
        assert other is not b
        assert_same(other, b)
        carried, _ = T.fori_loop(0, 2, lambda i, value: value, (net, x))
        assert carried is net
        return x

    run(call)


@pytest.mark.parametrize("swaps", [True, False])
def test_one_branch_exchanges_submodules(swaps):
    def exchange(net):
        net.a, net.b = net.b, net.a

    def call(net, x):
        a = net.a
        T.cond(swaps, exchange, lambda net: None, net)
        assert net.a is a
        return x

    before, (after, _) = run(lambda net, x: x)[0], run(call)
    assert_same(after.a, before.b if swaps else before.a)
    assert_same(after.b, before.a if swaps else before.b)


def test_a_predicate_for_each_example():
    net, xs = pax.BatchNorm1D(4), batch(2, 3, 4)
    got, ys = T.vmap(
        lambda net, p, x: (net, T.cond(p, lambda net, x: net(x), lambda net, x: x, net, x)),
        in_axes=0,
    )(T.stack_layers([net, net]), jnp.array([True, False]), xs)  # fmt: skip
    called, y = net % xs[0]
    assert_trees_close(ys, jnp.stack([y, xs[1]]))
    assert_trees_close(T.unstack_layers(got)[0].ema_mean, called.ema_mean)


def test_gradients_frozen_parts_and_steps():
    """A net with a frozen branch is trained through cond, fori_loop and remat, under jit."""

    def call(net, x, i):
        x = T.cond(i > 0, T.remat(lambda net, x: net.both(x)), lambda net, x: net.a(x), net, x)
        return T.fori_loop(0, 2, lambda _, x: jnp.tanh(x), x)

    def expected(net, x, i):
        return jnp.tanh(jnp.tanh(net.both(x) if i > 0 else net.a(x)))

    def grads(call, i):
        pax.seed_rng_key(0)
        net = Net(call)
        net = net.replace(b=pax.freeze_parameters(net.b))
        return T.jit(
            T.grad(lambda net, x: (jnp.sum(net(x, i) ** 2), net), has_aux=True)
        )(net, x)  # fmt: skip

    for i in (0, 1):
        (got, net), (want, after) = grads(call, i), grads(expected, i)
        assert_trees_close((got.a, net.a, net.b), (want.a, after.a, after.b))
        assert got.b.linear.weight == pax.EmptyNode()


def test_modules_made_in_a_loop_differ():
    def body(i, weights):
        return weights.at[i].set(pax.Linear(2, 1).weight[:, 0])

    def while_body(value):
        return body(value[1], value[0]), value[1] + 1

    for weights in (
        T.fori_loop(0, 3, body, jnp.zeros((3, 2))),
        T.while_loop(lambda value: value[1] < 3, while_body, (jnp.zeros((3, 2)), 0))[0],
    ):
        assert len(np.unique(np.asarray(weights), axis=0)) == 3


def test_without_jit_and_without_a_step():
    with jax.disable_jit():
        for call in (CONDITIONS["methods"], CONDITIONS["the whole"]):
            new, y = run(call, 1)
            assert_trees_close((new.a, new.b, y), (lambda n, y: (n.a, n.b, y))(*run(BRANCHES[1])))
        same_step = T.while_loop(lambda value: value[2] < 0, step, (Net(thrice), x, 0))
        assert same_step[1] is x


def test_closed_modules_stay_as_they_are():
    net = Block(4)
    y = T.cond(True, lambda net, x: net(x), lambda net, x: x, net, x)
    assert_trees_close(y, (net % x)[1])
    with refused(pax.errors.ImmutableModuleError):
        T.cond(True, net, lambda x: x, x)


def returned(f, g):
    return lambda net, x: T.cond(True, f, g, net.a, x)


def carried(body):
    return lambda net, x: T.fori_loop(0, 2, body, (net.a, x))


def set_extra(net, x):
    net.extra = x


def set_bias(net, x):
    net.linear.bias = x


MISTAKES = {
    "results": (
        returned(lambda net, x: {"y": [net(x)]}, lambda net, x: {"y": [x[0]]}),
        "true_fun and false_fun", "y.0: float32[3,4] against float32[4]",
    ),
    "kinds of results": (
        returned(lambda net, x: x, lambda net, x: (x, x)),
        "true_fun and false_fun", "(the root): an array against tuple of 2",
    ),
    "dtypes": (
        returned(lambda net, x: x, lambda net, x: x.astype(jnp.bfloat16)),
        "true_fun and false_fun", "the result: float32[3,4] against bfloat16[3,4]",
    ),
    "attributes": (
        returned(set_extra, lambda net, x: None),
        "true_fun and false_fun", "Block.extra: missing in the second tree",
    ),
    "shapes in modules": (
        lambda net, x: T.switch(0, [*[lambda net, x: None] * 2, set_bias], net.a, x),
        "branches[0] and branches[2]", "Block.linear.bias: float32[4] against float32[3,4]",
    ),
    "the carry": (
        carried(lambda i, value: (value[0], value[1][0])), "None",
        "1: float32[3,4] against float32[4]",
    ),
    "a carried module": (
        carried(lambda i, value: set_extra(*value) or value), "None",
        "0.extra: missing in the first tree",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "where", "got"), MISTAKES.values(), ids=MISTAKES)
def test_one_structure_for_all(call, where, got):
    with refused(pax.errors.StructureMismatchError, where=where, got=got):
        run(call)


def test_a_condition_changes_nothing():
    with refused(pax.errors.ImmutableModuleError):
        run(lambda net, x: T.while_loop(lambda x: net.a(x).sum() > 0, net.a, x))
    with refused(pax.errors.ImmutableModuleError):
        run(lambda net, x: T.while_loop(lambda v: v[0](v[1]).sum() > 0, lambda v: v, (net.a, x)))


def lax(name):
    """A call of jax's own function, with a layer that changes."""
    return {
        "cond": lambda net, x: jax.lax.cond(True, net.a, lambda x: x, x),
        "switch": lambda net, x: jax.lax.switch(0, [lambda x: net.a(x), lambda x: x], x),
        "scan": lambda net, x: jax.lax.scan(lambda c, _: (net.a(c), None), x, None, length=2),
        "map": lambda net, x: jax.lax.map(net.a, x[None]),
        "while_loop": lambda net, x: jax.lax.while_loop(lambda x: False, net.a, x),
        "fori_loop": lambda net, x: jax.lax.fori_loop(0, 2, lambda _, x: net.a(x), x),
    }[name]


@pytest.mark.parametrize("name", ["cond", "switch", "scan", "map", "while_loop", "fori_loop"])
def test_under_functions_of_jax_the_fitting_transforms_are_named(name):
    with refused(pax.errors.ImmutableModuleError, "pax_export.transforms", where="EMA.debias"):
        run(lax(name))


def test_elsewhere_the_fitting_transforms_are_named():
    with refused(pax.errors.ImmutableModuleError, "T.vmap", "jax.jit(pax.pure(f))"):
        run(lambda net, x: jax.vmap(net.a)(x[None]))
    with refused(pax.errors.ImmutableModuleError, "operand", where="EMA.debias"):
        run(lambda net, x: T.cond(True, lambda x: net.a(x), lambda x: x, x))


# --- loop ----------------------------------------------------------------------------


xs = {"a": jnp.arange(10.0).reshape(5, 2), "b": jnp.arange(5.0)}


def step_of_loop(state, x):
    state = state * 0.5 + x["a"].sum() + x["b"]
    return state, (state, x["a"] * state, None)


def loop(indices):
    state, states, arrays = 1.0, [None] * 5, [None] * 5
    for i in indices:
        x = {name: array[i] for name, array in xs.items()}
        state, (states[i], arrays[i], _) = step_of_loop(state, x)
    return state, jnp.stack(states), jnp.stack(arrays)


@pytest.mark.parametrize("options", [{}, {"length": 5}, {"unroll": 2}, {"unroll": True}])
@pytest.mark.parametrize("reverse", [False, True])
def test_equal_to_a_loop(options, reverse):
    state, (states, arrays, nothing) = pax.scan(step_of_loop, 1.0, xs, reverse=reverse, **options)
    expected = loop(range(5)[::-1] if reverse else range(5))
    for got, want in zip((state, states, arrays), expected):
        assert_close(got, want, rtol=1e-6)
    assert nothing is None


def test_batch_first():
    batch = {"a": jnp.moveaxis(xs["a"], 0, 1), "b": xs["b"]}  # b has time alone
    assert batch["a"].shape == (2, 5)
    state, (states, arrays, _) = pax.scan(step_of_loop, 1.0, batch, time_major=False)
    expected = loop(range(5))
    assert_close(state, expected[0], rtol=1e-6)
    assert_close(states, expected[1], rtol=1e-6)  # one number a step_of_loop (D60)
    assert_close(arrays, jnp.swapaxes(expected[2], 0, 1), rtol=1e-6)


def test_the_carry_keeps_its_axes():
    init = jnp.zeros((3, 4))
    state, _ = pax.scan(lambda s, x: (s + x.sum(), None), init, jnp.ones((2, 5)), time_major=False)
    assert state.shape == (3, 4) and float(state[0, 0]) == 10


class Cell(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.weight = jnp.full((2, 2), 0.3)

    def __call__(self, state, x):
        state = jnp.tanh(state @ self.weight + x)
        return state, state


def test_a_module_as_function():
    cell, state = Cell(), jnp.zeros(2)
    last, states = pax.scan(cell, state, xs["a"])
    for i, x in enumerate(xs["a"]):
        state, _ = cell(state, x)
        assert_close(states[i], state, rtol=1e-6)
    assert_close(last, state, rtol=1e-6)


def test_modules_of_one_structure_are_not_mixed_up():
    for value in (0.3, 0.7):
        cell = Cell().replace(weight=jnp.full((2, 2), value))
        _, states = pax.scan(cell, jnp.zeros(2), xs["a"])
        assert_close(states[1], cell(states[0], xs["a"][1])[0], rtol=1e-6)


def test_a_module_and_its_optimizer_as_state():
    def train(state, x):
        model, total = state
        return (model.map(lambda w: w * 0.5), total + x), model.weight.sum()

    (_, total), sums = pax.scan(train, (Cell(), 0.0), jnp.ones(3))
    assert_close(sums, [1.2, 0.6, 0.3], rtol=1e-6)
    assert float(total) == 3


def test_without_inputs():
    state, ys = pax.scan(lambda s, x: (s + 1, s), 0, None, length=3, time_major=False)
    assert int(state) == 3 and ys.tolist() == [0, 1, 2]
