"""The table of behaviour, one test for each row, under the numbers of the rows."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves, tree_structure

import pax_export as pax
from pax_export import EmptyNode
from pax_export import transforms as T
from tests.refusals import refused
from tests.transforms.models import (
    Block,
    Carry,
    assert_same,
    assert_trees_close,
    at,
    batch,
    in_a_loop,
    loss_and_module,
    stacked,
)

x = batch(3, 4)
seeded = functools.partial(pax.seed_rng_key, 7)


def selected(grads):
    """The dotted names of the leaves that a gradient has."""
    return {name for name, _ in pax.core.named_leaves(grads)}


# --- grad -------------------------------------------------------------------------------


def test_grad_g2_names_classes_and_their_combinations():
    def names(wrt):
        return selected(T.grad(loss_and_module, has_aux=True, wrt=wrt)(Block(4), x)[0])

    assert names("weight") == {"linear.weight"}
    assert names(T.All(pax.BatchNorm1D, T.Param)) == {"bn.scale", "bn.offset"}
    assert names(T.All(T.Param, T.Not(pax.BatchNorm1D))) == {"linear.weight", "linear.bias"}
    in_bn = {"bn.scale", "bn.offset"} | {
        name for name, _ in pax.core.named_leaves(Block(4)) if name.startswith("bn.ema")
    }
    floats = T.grad(loss_and_module, has_aux=True, wrt=pax.BatchNorm1D, allow_int=True)
    assert selected(floats(Block(4), x)[0]) == in_bn


def test_grad_g3_predicates_paths_masks_frozen_parts():
    net = pax.Sequential(pax.Linear(4, 4), pax.freeze_parameters(pax.Linear(4, 4)))
    mask = jax.tree_util.tree_map(lambda leaf: leaf.ndim == 1, net)

    def names(wrt):
        return selected(T.grad(lambda net: net(x).sum(), wrt=wrt)(net))

    assert names(lambda path, leaf: path[:2] == ("modules", 1)) == {
        "modules.1.weight",
        "modules.1.bias",
    }
    assert names(T.PathIn(("modules", 0, "bias"))) == {"modules.0.bias"}
    assert names(mask) == {"modules.0.bias", "modules.1.bias"}
    assert names(mask.parameters()) == {"modules.0.bias"}  # a hole selects nothing
    assert names(T.Param) == {"modules.0.weight", "modules.0.bias"}


@pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0)], ids=["legacy", "typed"])
def test_grad_g6_random_keys(key):
    model = Block(4)
    model = model.replace(dropout=model.dropout.replace(rng_key=key))
    grad = T.grad(loss_and_module, has_aux=True, wrt=T.RngState, allow_int=True)
    grads, _ = grad(model, x)
    assert selected(grads) == {"dropout.rng_key"}
    assert grads.dropout.rng_key.dtype == jax.dtypes.float0
    with refused(TypeError, where="dropout.rng_key"):
        T.grad(loss_and_module, has_aux=True, wrt=...)(model, x)


# --- jit --------------------------------------------------------------------------------


def test_jit_j1_traces():
    traces = []

    @T.jit
    def call(model, x):
        traces.append(model)
        return model, model(x)

    model = Block(4)
    counts = []
    for now in (model, call(model, x)[0], model.eval(), model.eval().train()):
        call(now, x)
        counts.append(len(traces))
    assert counts == [1, 1, 2, 2]


def test_jit_j2_donated_state():
    model, array = pax.Linear(4, 4), x + 0
    step = T.jit(lambda model, x: (model.map(lambda w: w + 1), x), donate_state=True)
    step(model, array)
    assert model.weight.is_deleted() and model.bias.is_deleted() and not array.is_deleted()


# --- vmap -------------------------------------------------------------------------------


def test_vmap_v1_layers_are_those_built_one_by_one():
    seeded()
    layers = T.Vmap(pax.Linear, axis_size=5)(3, 4)
    assert isinstance(layers, T.Vmap)
    weight = layers.vmap_module.weight
    assert weight.shape == (5, 3, 4)
    assert len(np.unique(np.asarray(weight), axis=0)) == 5
    for i in range(5):
        seeded()
        with T.rng_fold(i):
            assert_trees_close(at(layers.vmap_module, i), pax.Linear(3, 4))


def test_vmap_v3_axes_of_single_leaves():
    layers = T.Vmap(
        pax.Linear, axis_size=3, state_axes={"weight": 2, "bias": 1}, in_axes=(0, None)
    )(3, 4)
    assert layers.vmap_module.weight.shape == (3, 4, 3)
    assert layers.vmap_module.bias.shape == (4, 3)
    xs = batch(2, 3)
    one = pax.Linear(3, 4).replace(
        weight=layers.vmap_module.weight[:, :, 1], bias=layers.vmap_module.bias[:, 1]
    )
    assert_trees_close(layers(xs)[1], one(xs))


def test_vmap_v5_state_that_no_axis_covers():
    net, xs = Block(4), batch(5, 3, 4)

    def call(net, x):
        y = net(x)
        return net, y

    with refused(ValueError, "bn.ema_mean.averages is not covered by state_axes"):
        T.vmap(call, state_axes={T.RngState: 0})(net, xs)

    def call_and_average(norm, x):
        norm(x)
        for ema in (norm.ema_mean, norm.ema_var):
            ema.averages = jax.lax.pmean(ema.averages, "batch")
        return norm

    norm = pax.BatchNorm1D(4)
    mapped = T.vmap(call_and_average, state_axes={}, axis_name="batch")
    new = mapped(norm, xs[:, None])
    expected = (norm % xs.reshape(1, -1, 4))[0]
    assert_trees_close(new.ema_mean, expected.ema_mean)


def test_vmap_v9_calls_outside_of_pure():
    norms = T.Vmap(pax.BatchNorm1D, axis_size=5)(4)
    xs = batch(5, 2, 3, 4)
    with refused(ValueError, "immutable module"):
        norms(xs)
    new, y = norms % xs
    assert (norms.vmap_module.ema_mean.averages == 0).all()
    for i in range(5):
        one, y_of_one = pax.BatchNorm1D(4) % xs[i]
        assert_trees_close(at(new.vmap_module, i), one)
        assert_trees_close(y[i], y_of_one)
    assert norms.eval()(xs).shape == xs.shape


# --- scan -------------------------------------------------------------------------------


def test_scan_s1_equal_to_the_loop():
    net = T.Scan(Carry, length=5)(4)
    new, (y, nothing) = net % x
    layers, expected = in_a_loop([at(net.scan_module, i) for i in range(5)], x)
    assert nothing is None
    assert_trees_close(y, expected)
    assert_trees_close(new.scan_module, stacked(layers))


def test_scan_s2_shared_state():
    net = T.Scan(Carry, length=5, state_axes={T.Param: 0})(4)
    inner = net.scan_module
    assert inner.linear.weight.shape == (5, 4, 4)
    assert inner.dropout.rng_key.shape == (2,) and inner.bn.ema_mean.averages.shape == (1, 1, 4)
    new, (y, _) = net % x

    state, expected = inner, x
    for i in range(5):
        parameters = at(inner.parameters(), i)
        state, (expected, _) = (state | parameters) % expected
    assert_trees_close(y, expected)
    assert_trees_close(new.scan_module.bn.ema_var, state.bn.ema_var)
    assert_same(new.scan_module.dropout, state.dropout)


class WithNode(pax.Module):
    parameters = pax.parameters_method()

    def __init__(self):
        super().__init__()
        self.linear = pax.Linear(3, 3)
        self.node = jnp.ones(2)

    def __call__(self, x, a, b):
        assert (x.shape, a.shape, b.shape) == ((1, 3), (1, 3), (3,))
        x = self.linear(x + a + b)
        return x, (x, x)


def test_scan_s3_axes_of_inputs_and_outputs():
    net = T.Scan(
        WithNode,
        length=5,
        state_axes={"node": None, ...: 0},
        in_axes=(None, None, 0, None),
        out_axes=(1, 2),
    )()
    a, b = batch(5, 1, 3), batch(3)
    y, (first, second) = net(batch(1, 3), a, b)
    assert first.shape == (1, 5, 3) and second.shape == (1, 3, 5)
    assert net.scan_module.node.shape == (2,)
    expected = batch(1, 3)
    for i in range(5):
        expected = at(net.scan_module.linear, i)(expected + a[i] + b)
        assert_trees_close(first[:, i], expected)
        assert_trees_close(second[..., i], expected)
    assert_trees_close(y, expected)


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": 4}, {"unroll": True}])
def test_scan_s6_reverse_and_unroll(options):
    net = T.Scan(Carry, length=5, **options)(4)
    new, (y, _) = net % x
    order = range(5)[::-1] if options.get("reverse") else range(5)
    layers, expected = in_a_loop([at(net.scan_module, i) for i in order], x)
    assert_trees_close(y, expected)
    assert_trees_close(new.scan_module, stacked([layers[i] for i in order]))


def test_scan_s9_names_of_the_stacked_axis():
    inside = []

    class Layer(pax.Module):
        def __init__(self):
            super().__init__()
            self.linear = pax.Linear(4, 4).with_sharding(weight=("din", "dout"))

        def __call__(self, x):
            inside.append(T.get_partition_spec(self.linear).weight)
            return self.linear(x), None

    for label in ("layers", None):
        metadata = {} if label is None else {T.PARTITION_NAME: label}
        net = T.Scan(Layer, length=3, transform_metadata=metadata)()
        new, _ = net % x
        for each in (net, new):
            specs = T.get_partition_spec(each).scan_module.linear
            assert specs.weight == PartitionSpec(label, "din", "dout")
            assert specs.bias == PartitionSpec()
        assert tree_structure(new) == tree_structure(net)
    assert set(inside) == {PartitionSpec("din", "dout")}


def test_scan_s11_a_training_loop():
    import optax

    adam = pax.optim.from_optax(optax.adam(0.1))
    update = pax.build_update_fn(lambda net, x: (jnp.sum(net(x) ** 2), (net.weight.sum(), net)))

    def step(state, x):
        net, optimizer, total = update(*state, x)
        return (net, optimizer), total

    net, batches = pax.Linear(4, 4), batch(6, 3, 4)
    start = state = (net, adam(net.parameters()))
    totals = []
    for each in batches:
        state, total = step(state, each)
        totals.append(total)
    scanned, stacked_totals = T.scan(step)(start, batches)
    assert_trees_close(scanned, state)
    assert_trees_close(stacked_totals, jnp.stack(totals))


def test_scan_s12_vmap_of_scan():
    nets = T.Vmap(T.Scan(Carry, length=3), axis_size=2)(4)
    inner = nets.vmap_module.scan_module
    assert inner.linear.weight.shape == (2, 3, 4, 4) and inner.dropout.rng_key.shape == (2, 3, 2)
    xs = batch(2, 3, 4)
    new, (y, _) = nets % xs
    for i in range(2):
        layers, expected = in_a_loop([at(at(inner, i), j) for j in range(3)], xs[i])
        assert_trees_close(y[i], expected)
        assert_trees_close(at(new.vmap_module.scan_module, i), stacked(layers))


# --- remat ------------------------------------------------------------------------------


class Sine(pax.Linear):
    def __call__(self, x):
        return jnp.sin(super().__call__(x))


def test_remat_r1_what_is_computed_again():
    def products(ctor):
        program = jax.make_jaxpr(T.grad(lambda layer, x: layer(x).sum()))(ctor(4, 4), x)
        return str(program).count("dot_general[")

    keep_all = functools.partial(T.Remat, policy=jax.checkpoint_policies.everything_saveable)
    assert [products(ctor) for ctor in (Sine, T.Remat(Sine), keep_all(Sine))] == [2, 3, 2]


def test_remat_r2_scan_of_remat():
    results = []
    for ctor in (Carry, T.Remat(Carry)):
        seeded()
        net = T.Scan(ctor, length=3)(4)

        def loss(net, x):
            y, _ = net(x)
            return jnp.sum(y**2), (net, y)

        grads, (new, y) = T.grad(loss, has_aux=True)(net, x)
        results.append((tree_leaves(grads), tree_leaves(new), y))
    assert_trees_close(*results)
    assert net.scan_module.remat_module.linear.weight.shape == (3, 4, 4)


class Deep(pax.Module):
    @functools.partial(T.vmap, axis_size=5)
    def __init__(self):
        super().__init__()
        self.linear = pax.Linear(3, 3)

    @functools.partial(T.scan, carry_argnum=1)
    @T.remat
    def __call__(self, x):
        return jnp.sin(self.linear(x)), None


def test_remat_r4_decorated_methods():
    net, x = Deep(), batch(2, 3)
    assert net.linear.weight.shape == (5, 3, 3)
    expected = x
    for i in range(5):
        expected = jnp.sin(at(net.linear, i)(expected))
    assert_trees_close(net(x)[0], expected)


# --- all --------------------------------------------------------------------------------


def test_m1_other_methods_through_nested_wrappers():
    nets, xs = T.Vmap(T.Remat(Block), axis_size=2)(4), batch(2, 3, 4)
    new, y = pax.module_and_value(nets.call.enc)(xs)
    linear = nets.vmap_module.remat_module.linear
    assert_trees_close(y, jnp.stack([at(linear, i)(xs[i]) for i in range(2)]))
    assert_same(new, nets)
    new, y = pax.module_and_value(lambda nets, xs: nets.call.enc(xs))(nets, xs)
    assert y.shape == (2, 3, 4)
    with refused(AttributeError, "'Block'", "'decode'"):
        _ = nets.call.decode


@pytest.mark.parametrize(
    "build, shape",
    [
        (lambda: T.Scan(Carry, length=3)(4), "b, 4"),
        (lambda: T.Vmap(Block, axis_size=2, in_axes=(0, None))(4), "b, 4"),
    ],
    ids=["Scan", "Vmap"],
)
def test_m2_export(build, shape):
    net = build().eval()
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: net(x)))(spec)
    again = jax.export.deserialize(exported.serialize())
    for size in (1, 6):
        inputs = batch(size, 4)
        assert_same(again.call(inputs), jax.jit(lambda x: net(x))(inputs))


def test_m3_pickle_and_shapes():
    net = T.Scan(T.Remat(Carry), length=3, state_axes={T.Param: 0, T.Not("bn"): None})(4)
    again = pickle.loads(pickle.dumps(net))
    assert_same(again, net)
    assert_same((again % x)[1], (net % x)[1])
    shapes = jax.eval_shape(lambda: T.Scan(Carry, length=3)(4))
    assert tree_structure(shapes) == tree_structure(T.Scan(Carry, length=3)(4))
    assert shapes.scan_module.linear.weight.shape == (3, 4, 4)
    assert EmptyNode() == shapes.parameters().scan_module.dropout.rng_key


FILTERS = [T.Any("a"), T.All("a", T.Param), T.Not("a"), T.PathIn(("a",)), T.PathContains("a")]


@pytest.mark.parametrize("made", [*FILTERS, T.Param, T.State, T.RngState], ids=repr)
def test_filters_are_pickled_by_the_names_that_users_know(made):
    assert pickle.loads(pickle.dumps(made)) == made
    assert (made if isinstance(made, type) else type(made)).__module__ == "pax_export.transforms"
