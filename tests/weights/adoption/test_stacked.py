"""Arrays of single layers go into the leaves of stacked ones, by their numbers, and home again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import Free, N, normal


class Block(pax.ParameterModule):
    """A norm, two dense layers, and a factor that is no layer of ours."""

    def __init__(self, size, wide):
        super().__init__()
        self.norm = pax.LayerNorm(size, -1, True, True)
        self.up, self.down = pax.Linear(size, wide), pax.Linear(wide, size)
        self.gain = jnp.ones(size)

    def __call__(self, x):
        return x + self.gain * self.down(jnp.tanh(self.up(self.norm(x)))), None


def torch_blocks(count, size, wide, name="blocks"):
    file = {}
    for i in range(count):
        file |= {
            f"{name}.{i}.{at}": normal(*shape)
            for at, shape in (
                ("ln.weight", (size,)), ("ln.bias", (size,)), ("mlp.up.weight", (wide, size)),
                ("mlp.up.bias", (wide,)), ("mlp.down.weight", (size, wide)),
                ("mlp.down.bias", (size,)), ("gain", (size,)),
            )
        }  # fmt: skip
    return file


def shuffled(file):
    names = list(file)
    return {names[place]: file[names[place]] for place in N.permutation(len(names))}


def assert_is(module, file, count, name="blocks"):
    for i in range(count):
        at = f"{name}.{i}"
        assert np.array_equal(module.norm.scale[i], file[f"{at}.ln.weight"])
        assert np.array_equal(module.up.weight[i], file[f"{at}.mlp.up.weight"].T)
        assert np.array_equal(module.down.weight[i], file[f"{at}.mlp.down.weight"].T)
        assert np.array_equal(module.down.bias[i], file[f"{at}.mlp.down.bias"])
        assert np.array_equal(module.gain[i], file[f"{at}.gain"])


def test_layers_of_a_scan_come_in_the_order_of_their_numbers():
    file = shuffled(torch_blocks(11, 4, 6))
    net = Free(layers=T.Scan(Block, length=11)(4, 6), head=pax.Linear(4, 2))
    file |= {"head.weight": normal(2, 4), "head.bias": normal(2)}
    net, report = pax.weights.adopt(net, file)
    assert_is(net.layers.scan_module, file, 11)
    row = next(row for row in report.rows if row.leaf == "layers.scan_module.up.weight")
    assert row.how == "transposed, 11 stacked by their numbers"
    assert row.arrays[2] == "blocks.2.mlp.up.weight" and len(row.arrays) == 11
    assert "blocks.1.mlp.up.weight + ... + blocks.10.mlp.up.weight (11 arrays)" in str(report)


def test_a_module_that_was_stacked_by_hand():
    file = torch_blocks(3, 4, 6)
    for make in (
        lambda: T.stack_layers([Block(4, 6) for _ in range(3)]),
        lambda: T.Vmap(Block, axis_size=3)(4, 6).vmap_module,
    ):
        stacked = make()
        net, _ = pax.weights.adopt(Free(layers=stacked), file)
        assert_is(net.layers, file, 3)
        net, _ = pax.weights.adopt(stacked, file)  # the whole net is stacked
        assert_is(net, file, 3)
    shapes = jax.eval_shape(lambda: T.stack_layers([Block(4, 6) for _ in range(3)]))
    assert_is(pax.weights.adopt(shapes, file)[0], file, 3)


def test_a_leaf_of_ones_own_with_an_axis_of_layers():
    net = Free(embed=pax.Embed(7, 4), body=Free(w=jnp.ones((5, 4, 6)), b=jnp.ones((5, 6))))
    layers = {f"h.{i}.fc.{k}": normal(*s) for i in range(5) for k, s in
              (("weight", (6, 4)), ("bias", (6,)))}  # fmt: skip
    file = {"wte.weight": normal(7, 4), **layers}
    net, report = pax.weights.adopt(net, file, origin="torch")
    for i in range(5):
        assert np.array_equal(net.body.w[i], layers[f"h.{i}.fc.weight"].T)
        assert np.array_equal(net.body.b[i], layers[f"h.{i}.fc.bias"])
    assert report.rows[1].how == "transposed, 5 stacked by their numbers"


def test_stacks_in_stacks_and_stacks_in_lists():
    file = {f"stages.{i}.blocks.{j}.fc.{k}": normal(*s) for i in range(2) for j in range(3)
            for k, s in (("weight", (5, 4)), ("bias", (5,)))}  # fmt: skip

    def inner():
        return T.stack_layers([pax.Linear(4, 5) for _ in range(3)])

    for net, at in (
        (Free(stages=T.stack_layers([inner(), inner()])), lambda n, i, j: n.stages.weight[i, j]),
        (Free(stages=[inner(), inner()]), lambda n, i, j: n.stages[i].weight[j]),
        (Free(b=T.stack_layers([Free(c=[pax.Linear(4, 5) for _ in range(3)]) for _ in range(2)])),
         lambda n, i, j: n.b.c[j].weight[i]),
    ):  # fmt: skip
        net, _ = pax.weights.adopt(net, file)
        for i in range(2):
            for j in range(3):
                assert np.array_equal(at(net, i, j), file[f"stages.{i}.blocks.{j}.fc.weight"].T)


def test_of_two_numbers_that_may_be_either_nothing_is_guessed():
    """Two stacks of two: whether the list or the stack comes first, no shape says."""
    file = {f"stages.{i}.blocks.{j}.fc.{k}": normal(*s) for i in range(2) for j in range(2)
            for k, s in (("weight", (5, 4)), ("bias", (5,)))}  # fmt: skip
    net = Free(stages=[T.stack_layers([pax.Linear(4, 5) for _ in range(2)]) for _ in range(2)])
    with pytest.raises(pax.errors.AmbiguousWeightsError):
        pax.weights.adopt(net, file)
    net, _ = pax.weights.adopt(net, file, rename={"stages.*.blocks.*.fc": "stages.*.*"})
    for i in range(2):
        for j in range(2):
            name = f"stages.{i}.blocks.{j}.fc.weight"
            assert np.array_equal(net.stages[i].weight[j], file[name].T)


def test_all_kinds_of_layers_and_frameworks_stacked():
    h = 2
    cells = T.stack_layers([pax.LSTM(3, h, forget_gate_bias=1.0) for _ in range(3)])
    ups = T.stack_layers([pax.Conv2DTranspose(3, 5, 2) for _ in range(3)])
    norms = T.stack_layers([pax.BatchNorm2D(4) for _ in range(3)])
    file, single = {}, []
    for i in range(3):
        one = {f"rnn.{i}.weight_ih_l0": normal(4 * h, 3), f"rnn.{i}.weight_hh_l0": normal(4 * h, h),
               f"rnn.{i}.bias_ih_l0": normal(4 * h), f"rnn.{i}.bias_hh_l0": normal(4 * h),
               f"up.{i}.weight": normal(3, 5, 2, 2), f"up.{i}.bias": normal(5),
               f"bn.{i}.weight": normal(4), f"bn.{i}.bias": normal(4),
               f"bn.{i}.running_mean": normal(4), f"bn.{i}.running_var": abs(normal(4)),
               f"bn.{i}.num_batches_tracked": np.array(3)}  # fmt: skip
        file |= one
        net = Free(rnn=pax.LSTM(3, h, forget_gate_bias=1.0), up=pax.Conv2DTranspose(3, 5, 2),
                   bn=pax.BatchNorm2D(4))  # fmt: skip
        single.append(pax.weights.adopt(net, one)[0])
    net, _ = pax.weights.adopt(Free(rnn=cells, up=ups, bn=norms), file)
    expected = T.stack_layers(single)
    for one, other in zip(*map(jax.tree_util.tree_leaves, (net, expected))):
        assert_close(one, other, 1e-6)


def test_arrays_that_are_stacked_in_the_file_too_keep_their_layout():
    stacked = {"h.fc.weight": normal(3, 4, 4), "h.fc.bias": normal(3, 4)}
    net = T.stack_layers([pax.Linear(4, 4) for _ in range(3)])
    torch, _ = pax.weights.adopt(net, stacked, origin="torch")
    assert np.array_equal(torch.weight, stacked["h.fc.weight"].transpose(0, 2, 1))
    file = {"h/fc/kernel": stacked["h.fc.weight"], "h/fc/bias": stacked["h.fc.bias"]}
    flax, _ = pax.weights.adopt(net, file, origin="flax")
    assert np.array_equal(flax.weight, stacked["h.fc.weight"])


def test_a_layer_too_few_is_named():
    file = torch_blocks(3, 4, 6)
    net = T.stack_layers([Block(4, 6) for _ in range(4)])
    with refused(pax.errors.AdoptionError, "no array for 3.up.weight[4,6], 3.up.bias[6]") as caught:
        pax.weights.adopt(net, file)
    assert "no array for 2." not in str(caught.value)
    assert set(caught.value.missing) >= {"up.weight", "up.bias"}


def test_numbers_that_count_no_layers_are_not_an_order():
    net = Free(layers=T.stack_layers([pax.Linear(3, 4, False) for _ in range(3)]))
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.adopt(net, {f"arr_{i}": normal(3, 4) for i in range(3)}, origin="keras")


def test_other_layer_axes_are_not_guessed():
    net = T.Vmap(pax.Linear, axis_size=4, state_axes={...: 1})(4, 4)
    assert net.vmap_module.weight.shape == (4, 4, 4)
    file = {f"layers.{i}.{k}": normal(*s) for i in range(4) for k, s in
            (("weight", (4, 4)), ("bias", (4,)))}  # fmt: skip
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.adopt(net, file, origin="torch")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_stacked_layers_are_saved_as_single_ones(tmp_path, ending):
    file = torch_blocks(3, 4, 6)
    net, report = pax.weights.adopt(T.stack_layers([Block(4, 6) for _ in range(3)]), file)
    path = tmp_path / f"net.{ending}"
    pax.weights.save_as(net, path, like=file)
    with pax.weights.open_source(path) as source:
        assert set(source.entries) == set(file)
        assert all(e.read().tobytes() == file[n].tobytes() for n, e in source.entries.items())
    tuned = net.replace(up=net.up.replace(weight=net.up.weight.at[1].add(1)))
    pax.weights.save_as(tuned, path, like=file, report=report)
    with pax.weights.open_source(path) as source:
        for name, entry in source.entries.items():
            more = 1 if name == "blocks.1.mlp.up.weight" else 0
            assert_close(entry.read(), file[name] + more, 1e-6)
