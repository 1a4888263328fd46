"""`pax.debug.capture` and `statistics`: what modules return on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused


class Block(pax.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc, self.norm = pax.Linear(dim, dim), pax.LayerNorm(dim)

    def __call__(self, x):
        return x + jax.nn.relu(self.fc(self.norm(x)))


class Net(pax.Module):
    def __init__(self, dim: int = 3):
        super().__init__()
        self.blocks = [Block(dim), Block(dim)]
        self.head = pax.Linear(dim, 2)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def test_values_by_path_are_those_of_the_modules():
    net = Net()
    output, values = pax.debug.capture(net)(X)
    assert set(values) == {name for name, _ in pax.core.named_modules(net)}
    first = net.blocks[0](X)
    assert_close(values["blocks.0"], first)
    assert_close(values["blocks.1.norm"], net.blocks[1].norm(first))
    assert_close(output, net(X))


@pytest.mark.parametrize(
    ("chosen", "paths"),
    [
        ("head", {"head"}),
        ("blocks.*.fc", {"blocks.0.fc", "blocks.1.fc"}),
        (pax.LayerNorm, {"blocks.0.norm", "blocks.1.norm"}),
        (lambda path, module: path.endswith("1"), {"blocks.1"}),
        (["head", pax.LayerNorm], {"head", "blocks.0.norm", "blocks.1.norm"}),
    ],
)
def test_modules_are_chosen_by_path_class_and_function(chosen, paths):
    assert set(pax.debug.capture(Net(), chosen)(X)[1]) == paths


def test_unknown_paths_are_refused_with_a_near_path():
    with refused(ValueError, "blocks.0.fc"):
        pax.debug.capture(Net(), "block.0.fc")


def test_under_jit_vmap_and_grad():
    net = Net()
    capture = pax.debug.capture(net, "blocks.1")
    plain = capture(X)[1]["blocks.1"]
    assert_close(jax.jit(capture)(X)[1]["blocks.1"], plain)
    mapped = jax.vmap(lambda x: capture(x[None]))(X)[1]["blocks.1"]
    assert_close(mapped[:, 0], plain)

    def size(net):
        return (pax.debug.capture(net, "blocks.0")(X)[1]["blocks.0"] ** 2).sum()

    found = jax.grad(size)(net)
    assert float(jnp.abs(found.blocks[0].fc.weight).max()) > 0
    assert float(jnp.abs(found.head.weight).max()) == 0


def test_out_of_scan_while_cond_remat_and_jit():
    class Loops(pax.Module):
        def __init__(self):
            super().__init__()
            self.scanned = pax.transforms.Scan(Block, length=3, scan_output=False)(3)
            self.counted, self.looped = pax.Linear(3, 3), pax.Linear(3, 3)
            self.either = pax.Linear(3, 3)
            self.again, self.jitted = pax.transforms.Remat(pax.Linear)(3, 3), pax.Linear(3, 3)

        def __call__(self, x):
            x = self.scanned(x)
            x = jax.lax.fori_loop(0, 4, lambda i, x: self.counted(x), x)
            x = jax.lax.while_loop(lambda x: x.min() < 0.2, lambda x: self.looped(x) ** 2, x)
            x = jax.lax.cond(x.sum() > 1e9, lambda x: x, lambda x: self.either(x), x)
            return jax.jit(lambda layer, x: layer(x))(self.jitted, self.again(x))

    net = Loops()
    output, values = pax.debug.capture(net)(X)
    assert_close(output, net(X))
    rounds = values["scanned.scan_module"]
    assert rounds.shape == (3, 4, 3)
    assert_close(rounds[-1], net.scanned(X))
    x = net.scanned(X)
    for number in range(4):
        x = net.counted(x)
        assert_close(values["counted"][number], x)
    y = jnp.zeros_like(x)
    while x.min() < 0.2:
        y = net.looped(x)
        x = y**2
    assert_close(values["looped"], y)
    assert_close(values["either"], net.either(x))
    assert_close(values["again"], net.again(net.either(x)))
    assert_close(values["jitted"], output)


def test_a_module_that_is_called_twice_has_two_values():
    class Twice(pax.Module):
        def __init__(self):
            super().__init__()
            self.layer = pax.Linear(3, 3)

        def __call__(self, x):
            return self.layer(self.layer(x))

    net = Twice()
    first, second = pax.debug.capture(net, "layer")(X)[1]["layer"]
    assert_close(first, net.layer(X))
    assert_close(second, net(X))


def test_gradients_with_respect_to_values():
    net = Net()
    found = pax.debug.capture(net, ["blocks.1", "head"]).gradients(lambda y: (y**2).sum(), X)
    before = net.blocks[1](net.blocks[0](X))
    expected = jax.grad(lambda x: (net.head(x) ** 2).sum())(before)
    assert_close(found["blocks.1"], expected)
    assert_close(found["head"], 2 * net(X))


def test_gradients_inside_of_a_scan():
    net = pax.transforms.Scan(pax.Linear, length=3, scan_output=False)(3, 3)
    capture = pax.debug.capture(net, "scan_module")
    found = capture.gradients(jnp.sum, X)["scan_module"]
    assert found.shape == (3, 4, 3)
    assert_close(found[-1], np.ones((4, 3), np.float32))


def test_the_net_and_its_mode_stay():
    net = pax.Sequential(pax.BatchNorm1D(3), pax.Dropout(0.5))
    before = jax.tree_util.tree_leaves(net)
    pax.debug.capture(net)(X)
    assert all(a is b for a, b in zip(before, jax.tree_util.tree_leaves(net)))


def test_statistics_count_nan_and_zeros():
    net = pax.Sequential(jax.nn.relu, pax.Lambda(lambda x: jnp.log(x - 1)))
    found = pax.debug.statistics(net, jnp.array([-1.0, 0.5, 1.5, 2.5]))
    assert found["modules.0"].zeros == 0.25
    assert found["modules.1"].nan == 0.5
    assert str(found).splitlines()[0].split() == "path mean std min max nan zeros".split()


def test_layers_that_a_jitted_function_calls_are_captured_each_time():
    apply = jax.jit(lambda layer, x: layer(x))

    class Twins(pax.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = pax.Linear(3, 3), pax.Linear(3, 3)

        def __call__(self, x):
            return apply(self.b, apply(self.a, x))

    net, x = Twins(), jnp.ones((1, 3))
    apply(net.a, x)  # traced before without labels
    for _ in range(2):
        values = pax.debug.capture(net)(x)[1]
        assert set(values) == {"", "a", "b"}
        assert_close(values["a"], net.a(x), 1e-6)
        assert_close(values["b"], net(x), 1e-6)


def test_a_net_that_stacks_its_layers_when_it_is_called():
    class Stacked(pax.Module):
        def __init__(self):
            super().__init__()
            self.layers = [pax.Linear(3, 3) for _ in range(3)]

        def __call__(self, x):
            layers = jax.tree_util.tree_map(lambda *each: jnp.stack(each), *self.layers)
            return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0]

    net, x = Stacked(), jnp.ones((1, 3))
    values = pax.debug.capture(net)(x)[1]
    assert_close(values[""], net(x), 1e-6)
    assert values["layers.0"].shape == (3, 1, 3)
    assert pax.debug.statistics(net, x)["layers.0"].nan == 0
    assert "layers.0" in str(pax.inspect(net, x))
