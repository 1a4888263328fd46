"""The rules that all transforms share: purity, write-back, strictness, captures, aliases."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import tree_leaves, tree_structure

import pax_export as pax
from pax_export import transforms as T
from tests.refusals import refused
from tests.transforms.each import ROWS
from tests.transforms.models import Block, Carry, assert_trees_close, at, batch, stacked


class Counter(pax.Module):
    """A module that counts its calls, and holds one that does."""

    parameters = pax.parameters_method("scale")

    def __init__(self, depth: int = 1):
        super().__init__()
        self.scale = jnp.ones(())
        self.count = jnp.zeros(())
        self.inner = Counter(depth - 1) if depth else None

    def __call__(self, x):
        self.count = self.count + 1
        x = x * self.scale
        return self.inner(x) if self.inner else x

    def scanned(self, x):
        return self(x), None


ALONE = {name: row.alone for name, row in ROWS.items()}
each_transform = pytest.mark.parametrize("transform", ALONE.values(), ids=ALONE)


def use(module, x):
    return jnp.sum(module(x))


@each_transform
def test_r1_outside_nothing_changes(transform):
    module = Counter()
    leaves = tree_leaves(module)
    assert float(transform(use)(module, jnp.ones(()))) == 1
    assert all(a is b for a, b in zip(leaves, tree_leaves(module)))


@each_transform
def test_r2_what_is_open_is_changed_in_place(transform):
    def step(module, x):
        inner = module.inner
        y = transform(use)(module, x)
        assert module.inner is inner
        module.scale = module.scale * 2  # it is still open
        return module, y

    new, y = pax.pure(step)(Counter(), jnp.ones(()))
    assert (float(new.count), float(new.inner.count), float(new.scale), float(y)) == (1, 1, 2, 1)


@each_transform
def test_r2_new_and_moved_submodules(transform):
    class Pair(pax.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Counter(0), Counter(0)

    def swap(pair, x):
        pair.a, pair.b = pair.b, pair.a
        pair.b = Counter(0).replace(count=jnp.full((), 5.0))
        return use(pair.a, x)

    def step(pair, x):
        a, b = pair.a, pair.b
        transform(swap)(pair, x)
        assert pair.a is b and pair.b is not a
        return pair

    new = pax.pure(step)(Pair(), jnp.ones(()))
    assert (float(new.a.count), float(new.b.count)) == (1, 5)


@pytest.mark.parametrize("wrt", [T.Param, ...], ids=["Param", "all"])
def test_r2_gradients_have_the_structure_before_the_function_changed_it(wrt):
    def loss(module):
        y = use(module, jnp.ones(()))
        module.extra, module.inner = jnp.ones(2), None
        return y

    def step(module):
        return module, T.grad(loss, wrt=wrt)(module)

    new, grads = pax.pure(step)(Counter())
    assert new.extra.shape == (2,) and new.inner is None
    assert float(grads.inner.scale) == 1
    wanted = Counter().parameters() if wrt is T.Param else Counter()
    assert tree_structure(grads) == tree_structure(wanted)


@pytest.mark.parametrize("transform", [ALONE["jit"], ALONE["remat"], ALONE["vmap"]])
def test_r2_a_returned_module_that_is_open_is_that_object(transform):
    def step(module, x):
        returned = transform(lambda module, x: (module, module(x)))(module, x)[0]
        assert returned is module
        return module

    assert float(pax.pure(step)(Counter(), jnp.ones(())).count) == 1


@pytest.mark.parametrize("transform", [ALONE["jit"], ALONE["remat"], ALONE["vmap"]])
def test_r2_a_returned_submodule_that_is_open_is_that_object(transform):
    def step(module):
        inner, outer = transform(lambda module: (module.inner, [module]))(module)
        assert inner is module.inner and outer[0] is module
        unchanged = transform(lambda module: module.inner)(module)
        assert unchanged is inner
        return module

    pax.pure(step)(Counter())


@each_transform
def test_r5_changes_of_one_copy_are_not_undone_by_another(transform):
    def step(parent, x):
        for arguments in ((parent, parent.inner), (parent.inner, parent), (parent.inner,) * 2):
            transform(lambda inner, others: use(getattr(inner, "inner", None) or inner, x))(
                arguments[0], list(arguments[1:])
            )
        return parent

    assert float(pax.pure(step)(Counter(), jnp.ones(())).inner.count) == 3

    def both(parent, x):
        transform(lambda inner, others: use(inner, x) + use(others[0], x))(parent, [parent])

    with refused(pax.errors.SharedNodeError):
        pax.pure(both)(Counter(), jnp.ones(()))


@each_transform
def test_r4_captured_modules_cannot_be_changed(transform):
    module = Counter()
    with refused(ValueError, where="Counter.count"):
        transform(lambda other, x: jnp.sum(module(x)))(Counter(), jnp.ones(()))

    def step(module, x):
        return transform(lambda other, x: jnp.sum(module(x)))(Counter(), x)

    with refused(ValueError, where="Counter.count"):
        pax.pure(step)(module, jnp.ones(()))


@pytest.mark.parametrize("name", ["__call__", "scanned"])
def test_r4_a_module_or_a_bound_method_is_captured(name):
    module = Counter()
    function = module if name == "__call__" else module.scanned
    for transform in (T.jit, T.vmap, T.remat):
        with refused(ValueError, where="Counter.count"):
            transform(function)(jnp.ones(2))
    layer = pax.Linear(2, 2)
    assert T.vmap(layer)(batch(3, 1, 2)).shape == (3, 1, 2)
    assert T.jit(layer.__call__)(batch(1, 2)).shape == (1, 2)


@each_transform
def test_r5_sharing_inside_one_module(transform):
    def share_after(module, x):
        y = use(module, x)
        module.inner.count = module.count
        return y

    with refused(ValueError, where="count and inner.count"):
        transform(share_after)(Counter(), jnp.ones(()))


def test_r5_one_module_twice_is_two_copies():
    def step(a, b):
        a(jnp.ones(()))
        return a.count, b.count

    module = Counter()
    assert [float(x) for x in T.jit(step)(module, module)] == [1, 0]


@each_transform
def test_r6_the_structure_is_kept(transform):
    seen = []

    def look(module, x):
        seen.append(tree_structure(module))
        return use(module, x)

    module = Counter()
    new = pax.pure(lambda m: (transform(look)(m, jnp.ones(())), m)[1])(module)
    assert {*seen, tree_structure(new)} == {tree_structure(module)}


@pytest.mark.parametrize("build", [
    lambda: T.Vmap(Block, axis_size=3, in_axes=(0, None))(4),
    lambda: T.Scan(Carry, length=3)(4),
    lambda: T.Remat(Block)(4),
], ids=["Vmap", "Scan", "Remat"])  # fmt: skip
def test_r3_strict_wrappers(build):
    net, x = build(), batch(2, 4)
    with refused(pax.errors.ImmutableModuleError, "immutable module"):
        net(x)
    new, _ = net % x
    assert tree_structure(new) == tree_structure(net)
    assert not all(a is b for a, b in zip(tree_leaves(new), tree_leaves(net)))
    assert new.eval()(x) is not None


def test_wrappers_inside_another_module_are_written_back():
    class Outer(pax.Module):
        def __init__(self):
            super().__init__()
            self.body = T.Scan(Carry, length=2)(4)

        def __call__(self, x):
            scan, inner = self.body, self.body.scan_module
            y, _ = self.body(x)
            assert self.body is scan and self.body.scan_module is inner
            return y

    net = Outer()
    new, _ = net % batch(2, 4)
    direct, _ = net.body % batch(2, 4)
    assert_trees_close(new.body, direct)


def test_a_decorated_method_writes_back():
    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.norm = pax.BatchNorm1D(2)

        @T.jit
        def __call__(self, x):
            return self.norm(x)

        @functools.partial(T.vmap, in_axes=(None, 0), state_axes={})
        def each(self, x):
            return self.norm.eval()(x)

    x = batch(3, 4, 2)
    new, _ = Net() % x
    expected, _ = pax.BatchNorm1D(2) % x
    assert_trees_close(new.norm, expected)
    assert new.each(x[:, None]).shape == (3, 1, 4, 2)


def test_axes_of_open_modules_in_containers():
    one, other = Counter(), Counter(0).map(lambda x: jnp.arange(3.0))

    @functools.partial(
        T.vmap, in_axes=([None, {"b": 0}], 0), in_axes_kwargs={"more": (0,)}, out_axes=-1
    )
    def added(counters, x, more):
        for counter in (counters[1]["b"], *more):
            counter.count += x
        return counters[0].count + x

    @functools.partial(T.scan, in_axes=([None, {"b": 0}], 0, None), carry_argnum=2)
    def summed(counters, x, total):
        counters[0].count += x
        counters[1]["b"].count += x
        return total + x, total

    @pax.pure
    def run(one, other, third):
        y = added([one, {"b": other}], jnp.ones(3), more=(third,))
        total, _ = summed([one, {"b": other}], jnp.arange(3.0), 0.0)
        return y, total, one, other, third

    y, total, one, new, third = run(one, other, other.map(lambda x: -x))
    assert y.tolist() == [1, 1, 1] and total == 3 and one.count == 3
    assert new.count.tolist() == [1, 3, 5] and third.count.tolist() == [1, 0, -1]


def test_a_loop_under_jit_carries_modules():
    @T.jit
    def train(net, xs):
        return T.scan(lambda net, x: (net, net(x)))(net, xs)

    xs = batch(3, 2, 4)
    net, ys = train(Block(4), xs)
    pax.seed_rng_key(42)
    expected, outputs = Block(4), []
    for x in xs:
        expected, y = expected % x
        outputs.append(y)
    assert_trees_close(net, expected)
    assert_trees_close(ys, jnp.stack(outputs))


def test_layers_of_a_list_and_stacked_ones():
    layers = [Block(4) for _ in range(3)]
    assert_trees_close(T.stack_layers(layers), stacked(layers))
    for i, layer in enumerate(T.unstack_layers(T.stack_layers(layers, axis=-1), axis=-1)):
        assert_trees_close(layer, at(stacked(layers), i))


def test_jax_jit_takes_what_transforms_jit_returned():
    step = T.jit(lambda net, x: (net.map(jnp.sin), net(x)))
    net, _ = step(pax.Linear(2, 2), batch(1, 2))
    again, _ = step(net, batch(1, 2))
    assert jax.jit(lambda net: net.weight.sum())(again).shape == ()
    assert again == again.copy() and again.replace(bias=jnp.ones(2)).bias[0] == 1


@pytest.mark.parametrize(
    ("cls", "function", "other"),
    [
        (T.Vmap, T.vmap, {"state_axes": {...: 0}}),
        (T.Scan, T.scan, {"state_axes": {...: 0}, "carry_argnum": 1}),
        (T.Remat, T.remat, {}),
    ],
)
def test_lifted_modules_take_the_options_of_their_functions(cls, function, other):
    ctor, *options = inspect.signature(cls).parameters.values()
    _, *own = inspect.signature(function).parameters.values()
    assert ctor.name == "ctor"
    assert [option.name for option in options] == [option.name for option in own]
    defaults = {option.name: option.default for option in own} | other
    assert {option.name: option.default for option in options} == defaults
    assert all(f"\n    {option.name}: " in inspect.getdoc(cls) for option in options)
    with refused(TypeError, "'axis'"):
        cls(pax.Linear, axis=0)


def test_options_of_remat_by_position():
    layer = T.Remat(Block, False, 2)(3)
    assert dict(layer.options) == {"prevent_cse": False, "static_argnums": (2,), "policy": None}
