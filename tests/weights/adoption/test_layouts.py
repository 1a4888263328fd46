"""What torch, Keras and flax write becomes a module that computes what they do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import (
    CASES,
    LAYOUTS,
    Free,
    assert_refused,
    attentive,
    normal,
)


@pytest.mark.parametrize("make", CASES)
def test_a_net_computes_what_the_framework_does(make):
    case = make(3)
    call = jax.jit(case.call)
    for framework in LAYOUTS:
        before = jax.tree_util.tree_leaves(case.net)
        net, _ = pax.weights.adopt(case.net, case.file(framework))
        assert_close(call(net.eval(), case.x), case.forward(case.x), 1e-5, where=framework)
        after = jax.tree_util.tree_leaves(case.net)
        assert all(one is other for one, other in zip(before, after))  # it stays as it was


def torchvision(blocks=(2, 2, 2, 2), classes=5):
    """A state dict with the names and shapes of torchvision's resnet18."""
    found = {}

    def conv(name, out, inputs, k):
        found[f"{name}.weight"] = normal(out, inputs, k, k)

    def norm(name, c):
        for part in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{part}"] = normal(c)
        found[f"{name}.num_batches_tracked"] = np.array(3)

    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    inputs = 64
    for group, count in enumerate(blocks):
        c = 64 * 2**group
        for block in range(count):
            name = f"layer{group + 1}.{block}"
            conv(f"{name}.conv1", c, inputs, 3)
            norm(f"{name}.bn1", c)
            conv(f"{name}.conv2", c, c, 3)
            norm(f"{name}.bn2", c)
            if block == 0 and group > 0:
                conv(f"{name}.downsample.0", c, inputs, 1)
                norm(f"{name}.downsample.1", c)
            inputs = c
    found["fc.weight"], found["fc.bias"] = normal(classes, 512), normal(classes)
    return found


def test_resnet18_of_torchvision():
    file = torchvision()
    shapes = jax.eval_shape(lambda: pax.nets.ResNet18(3, 5))
    net, report = pax.weights.adopt(shapes, file)
    expected = {"initial_conv": "conv1", "initial_batchnorm": "bn1", "logits": "fc"}
    for group in range(4):
        for block in range(2):
            here, there = f"block_groups.{group}.blocks.{block}", f"layer{group + 1}.{block}"
            for step in range(2):
                expected[f"{here}.layers.{step}.0"] = f"{there}.conv{step + 1}"
                expected[f"{here}.layers.{step}.1"] = f"{there}.bn{step + 1}"
            expected[f"{here}.proj_conv"] = f"{there}.downsample.0"
            expected[f"{here}.proj_batchnorm"] = f"{there}.downsample.1"
    for row in report.rows:
        here = row.leaf.rpartition(".ema_")[0] or row.leaf.rpartition(".")[0]
        assert row.arrays[0].rpartition(".")[0] == expected[here], row
    first = net.block_groups[2].blocks[0]
    kernel = file["layer3.0.conv1.weight"]
    assert np.array_equal(first.layers[0][0].weight, kernel.transpose(2, 3, 1, 0))
    mean = file["layer3.0.downsample.1.running_mean"]
    assert np.array_equal(first.proj_batchnorm.ema_mean.averages.ravel(), mean)
    assert np.array_equal(net.logits.weight, file["fc.weight"].T)
    assert float(first.proj_batchnorm.ema_mean.debias) == 1


def test_statistics_go_on_from_where_they_were():
    names = ("weight", "bias", "running_mean", "running_var")
    file = {f"bn.{name}": 1 + np.abs(normal(3)) for name in names}
    net, _ = pax.weights.adopt(pax.BatchNorm1D(3, decay_rate=0.9), file)
    net, _ = net % np.zeros((4, 3), np.float32)
    assert_close(net.ema_mean.averages.ravel(), 0.9 * file["bn.running_mean"], 1e-6)


def test_a_gru_of_keras_keeps_what_ours_replaces():
    inputs, h = 3, 2
    file = {"gru/gru_cell/kernel": normal(inputs, 3 * h),
            "gru/gru_cell/recurrent_kernel": normal(h, 3 * h),
            "gru/gru_cell/bias": normal(3 * h)}  # fmt: skip
    net, _ = pax.weights.adopt(Free(cell=pax.GRU(inputs, h)), file)
    x, state = normal(4, inputs), normal(4, h)
    w, u, b = (np.split(a, 3, -1) for a in file.values())
    z = sigmoid(x @ w[0] + state @ u[0] + b[0])
    r = sigmoid(x @ w[1] + state @ u[1] + b[1])
    new = np.tanh(x @ w[2] + (r * state) @ u[2] + b[2])
    _, y = net.cell(pax.GRUState(state), x)
    assert_close(y, z * state + (1 - z) * new, 1e-5)


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_a_gru_that_resets_after_the_product(framework):
    inputs, h = 3, 2
    file = {"gru/gru_cell/kernel": normal(inputs, 3 * h),
            "gru/gru_cell/recurrent_kernel": normal(h, 3 * h),
            "gru/gru_cell/bias": normal(2, 3 * h)}  # fmt: skip
    w, u, b = (np.split(a, 3, -1) for a in file.values())
    if framework == "torch":  # the other order of the gates, transposed, and two biases
        r_z_n = lambda parts: np.concatenate([parts[1], parts[0], parts[2]], -1)  # noqa: E731
        file = {"gru.weight_ih_l0": r_z_n(w).T, "gru.weight_hh_l0": r_z_n(u).T,
                "gru.bias_ih_l0": r_z_n(b)[0], "gru.bias_hh_l0": r_z_n(b)[1]}  # fmt: skip
    net, _ = pax.weights.adopt(Free(cell=pax.GRU(inputs, h, reset_after=True)), file)
    x, state = normal(4, inputs), normal(4, h)
    z = sigmoid(x @ w[0] + state @ u[0] + b[0].sum(0))
    r = sigmoid(x @ w[1] + state @ u[1] + b[1].sum(0))
    new = np.tanh(x @ w[2] + b[2][0] + r * (state @ u[2] + b[2][1]))
    _, y = net.cell(pax.GRUState(state), x)
    assert_close(y, z * state + (1 - z) * new, 1e-5)


def test_a_convolution_of_one_place_is_a_dense_layer_and_the_other_way_round():
    file = {"a.weight": normal(5, 3, 1, 1), "a.bias": normal(5), "b.weight": normal(2, 5),
            "b.bias": normal(2)}  # fmt: skip
    net, _ = pax.weights.adopt(Free(first=pax.Linear(3, 5), second=pax.Conv2D(5, 2, 1)), file)
    assert np.array_equal(net.first.weight, file["a.weight"][:, :, 0, 0].T)
    assert np.array_equal(net.second.weight[0, 0], file["b.weight"].T)


def test_layers_go_to_a_mesh_one_after_the_other():
    file = {"a.weight": normal(8, 4), "a.bias": normal(8)}
    mesh = pax.sharding.make_mesh(devices=jax.devices()[:1], model=1)
    rules = {"weight": jax.sharding.PartitionSpec(None, "model")}
    net, _ = pax.weights.adopt(pax.Linear(4, 8), file, mesh=mesh, rules=rules)
    assert net.weight.sharding.mesh == mesh
    assert np.array_equal(net.weight, file["a.weight"].T)
    with refused(pax.errors.InvalidArgumentTypeError, "mesh"):
        pax.weights.adopt(pax.Linear(4, 8), file, rules=rules)


def test_dtypes_are_those_of_the_module_or_as_it_is_said():
    file = {"w": normal(4, 8).astype(np.float64), "b": normal(8).astype(np.float16)}
    net, _ = pax.weights.adopt(pax.Linear(4, 8), file)
    assert net.weight.dtype == net.bias.dtype == jnp.float32
    net, _ = pax.weights.adopt(pax.Linear(4, 8), file, dtype="bfloat16")
    assert net.weight.dtype == net.bias.dtype == jnp.bfloat16


def test_random_keys_of_an_abstract_module_are_drawn():
    shapes = jax.eval_shape(lambda: pax.Sequential(pax.Linear(2, 3), pax.Dropout(0.5)))
    net, report = pax.weights.adopt(shapes, {"fc.weight": normal(3, 2), "fc.bias": normal(3)})
    assert report.kept == ("modules.1.rng_key",)
    net, y = net % np.ones((2, 2), np.float32)
    assert y.shape == (2, 3)


def test_flax_writes_it_so():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.ConvTranspose(4, (2, 2), strides=(2, 2), padding="VALID")(x)
            x = linen.BatchNorm(use_running_average=True)(x)
            x = x.reshape(x.shape[0], -1, 4)
            return x + linen.MultiHeadDotProductAttention(num_heads=2)(x, x)

    x = normal(1, 2, 2, 3)
    variables = Net().init(jax.random.key(0), x)
    variables = jax.tree_util.tree_map(lambda a: a + np.abs(normal(*a.shape)), variables)
    net = Free(up=pax.Conv2DTranspose(3, 4, 2, 2, "VALID"), norm=pax.BatchNorm2D(4),
               attention=pax.MultiHeadAttention(2, 2)).eval()  # fmt: skip
    net, _ = pax.weights.adopt(net, variables)
    y = net.norm(net.up(x)).reshape(1, -1, 4)
    assert_close(y + net.attention(y, y, y), Net().apply(variables, x), 1e-5)


def test_attention_as_other_programs_of_torch_keep_it():
    case = attentive(3)
    for framework, options in (("gpt2", {}), ("bert", {}), ("neox", {"fused": "by head"})):
        net, _ = pax.weights.adopt(case.net, case.file(framework), origin="torch", **options)
        assert_close(case.call(net, case.x), case.forward(case.x), 1e-5, where=framework)


def test_names_of_gguf():
    d, file = 4, {"token_embd.weight": normal(7, 4), "output_norm.weight": normal(4)}
    for i in range(2):
        for word in ("q", "k", "v", "output"):
            file[f"blk.{i}.attn_{word}.weight"] = normal(d, d)
        file[f"blk.{i}.attn_norm.weight"] = normal(d)

    def dense():
        return pax.Linear(d, d, with_bias=False)

    layers = [
        Free(query=dense(), key=dense(), value=dense(), output=dense(),
             norm=pax.LayerNorm(d, -1, True, False))
        for _ in range(2)
    ]  # fmt: skip
    last = pax.LayerNorm(d, -1, True, False)
    net = Free(embed=pax.Embed(7, d), layers=layers, final_norm=last)
    net, _ = pax.weights.adopt(net, file, origin="torch")
    assert np.array_equal(net.layers[1].key.weight, file["blk.1.attn_k.weight"].T)
    assert np.array_equal(net.layers[0].norm.scale, file["blk.0.attn_norm.weight"])
    assert np.array_equal(net.final_norm.scale, file["output_norm.weight"])


def test_a_gru_of_ours_comes_from_a_file_of_ours(tmp_path):
    """Its arrays are those of two layers there, and of one layer elsewhere."""
    net = Free(first=pax.Linear(3, 5), cells=[pax.GRU(5, 5), pax.GRU(5, 5)])
    pax.save_weights(net, tmp_path / "net.safetensors")
    shapes = jax.eval_shape(net.copy)
    for source in (tmp_path / "net.safetensors", net, dict(pax.core.named_leaves(net))):
        new, report = pax.weights.adopt(shapes, source)
        assert jax.tree.all(jax.tree.map(np.array_equal, new, net))
        assert report.origin == "pax"


@pytest.mark.parametrize("lost", ["bias_ih", "bias_hh"])
def test_a_cell_of_torch_without_one_of_its_biases_is_refused(lost):
    """It is no cell of Equinox, which has one bias."""
    file = {
        "weight_ih": normal(16, 3), "weight_hh": normal(16, 4),
        "bias_ih": normal(16), "bias_hh": normal(16),
    }  # fmt: skip
    pax.weights.adopt(pax.LSTM(3, 4), {f"{name}_l0": array for name, array in file.items()})
    del file[lost]
    assert_refused(pax.LSTM(3, 4), {f"{name}_l0": array for name, array in file.items()})


def test_a_cell_of_equinox():
    eqx = pytest.importorskip("equinox")
    theirs = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
    cell, _ = pax.weights.adopt(pax.LSTM(3, 4), theirs)
    x = jax.random.normal(jax.random.key(1), (3,))
    state, _ = cell(cell.initial_state(1), x[None])
    hidden, memory = theirs(x, (jnp.zeros(4), jnp.zeros(4)))
    assert_close(state.hidden[0], hidden, rtol=1e-5)
    assert_close(state.cell[0], memory, rtol=1e-5)
