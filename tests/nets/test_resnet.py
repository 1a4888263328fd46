"""The residual networks: published sizes, the formula of a small one, configurations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import modules_and_leaves
from pax_export.nets._resnet import ConvStep, ResNet, ResnetBlock
from tests.closeness import assert_close
from tests.refusals import refused

# Trainable parameters for (3, 1000), as published with the weights of torchvision
# and timm; and how many blocks the four groups have.
PUBLISHED = {
    pax.nets.ResNet18: (11_689_512, (2, 2, 2, 2)),
    pax.nets.ResNet34: (21_797_672, (3, 4, 6, 3)),
    pax.nets.ResNet50: (25_557_032, (3, 4, 6, 3)),
    pax.nets.ResNet101: (44_549_160, (3, 4, 23, 3)),
    pax.nets.ResNet152: (60_192_808, (3, 8, 36, 3)),
    pax.nets.ResNet200: (64_673_832, (3, 24, 36, 3)),
}
each_net = pytest.mark.parametrize("make", PUBLISHED, ids=lambda make: make.__name__)


class Tiny(ResNet):
    """Two groups of basic blocks; the first group does not project."""

    blocks_per_group = (2, 1)
    bottleneck = False


class TinyBottleneck(ResNet):
    blocks_per_group = (1,)


def shapes(make, *args, **options):
    """The network with shapes in place of arrays: nothing is computed."""
    return jax.eval_shape(lambda: make(*args, **options))


def images(*shape):
    return jnp.asarray(np.random.RandomState(0).standard_normal(shape).astype(np.float32))


def filled(make, *args, **options):
    """The network with weights of numpy, and norms that change what they get."""
    draws = np.random.RandomState(1)

    def fill(leaf):
        of_norm = leaf.shape[:1] == (1,) or leaf.shape == ()
        values = draws.uniform(0.5, 1.5, leaf.shape) if of_norm else draws.normal(size=leaf.shape)
        return jnp.asarray((values if of_norm else values / 10).astype(leaf.dtype))

    return jax.tree_util.tree_map(fill, shapes(make, *args, **options))


# --- published sizes -----------------------------------------------------------------


@each_net
def test_published_sizes(make):
    net = shapes(make, 3, 1000)
    count, blocks = PUBLISHED[make]
    assert sum(leaf.size for leaf in jax.tree_util.tree_leaves(net.parameters())) == count
    assert tuple(len(group.blocks) for group in net.block_groups) == blocks
    assert net.name == make.__name__


def convolutions(block):
    return [(conv.kernel_shape[0], conv.out_features, conv.stride[0]) for conv, _ in block.layers]


def basic(channels, stride):
    return [(3, channels, stride), (3, channels, 1)]


def bottleneck(channels, stride):
    """The middle convolution is a quarter as wide, and has the stride."""
    return [(1, channels // 4, 1), (3, channels // 4, stride), (1, channels, 1)]


@pytest.mark.parametrize(
    ("make", "block", "channels"),
    [
        (pax.nets.ResNet34, basic, (64, 128, 256, 512)),
        (pax.nets.ResNet50, bottleneck, (256, 512, 1024, 2048)),
    ],
)
def test_blocks(make, block, channels):
    groups = shapes(make, 3, 1000).block_groups
    for group, width, stride in zip(groups, channels, (1, 2, 2, 2), strict=True):
        first, *others = group.blocks
        assert convolutions(first) == block(width, stride)
        assert first.use_projection is (width > 64)
        if first.use_projection:
            assert first.proj_conv.stride == (stride, stride)
        for each in others:
            assert convolutions(each) == block(width, 1)
            assert each.use_projection is False


@pytest.mark.parametrize("make", [pax.nets.ResNet18, pax.nets.ResNet50])
def test_shape_of_the_output(make):
    def classify(images):
        return make(3, 7).eval()(images)

    assert jax.eval_shape(classify, jnp.ones((2, 3, 64, 48))).shape == (2, 7)


# --- the formula -----------------------------------------------------------------------


def conv(layer, x):
    """A convolution, one place of the kernel after the other."""
    pads = [(0, 0), (0, 0), *layer.padding]
    weight, x = np.asarray(layer.weight, np.float64), np.pad(x, pads)
    height, width = weight.shape[:2]
    step_h, step_w = layer.stride
    rows, columns = (x.shape[2] - height) // step_h + 1, (x.shape[3] - width) // step_w + 1
    y = np.zeros((x.shape[0], weight.shape[3], rows, columns))
    for i, j in itertools.product(range(height), range(width)):
        window = x[:, :, i : i + rows * step_h : step_h, j : j + columns * step_w : step_w]
        y += np.einsum("bihw,io->bohw", window[:, :, :rows, :columns], weight[i, j])
    return y


def norm(layer, x):
    mean, variance = np.asarray(layer.ema_mean.averages), np.asarray(layer.ema_var.averages)
    scaled = (x - mean) / np.sqrt(variance + 1e-5) * np.asarray(layer.scale)
    return scaled + np.asarray(layer.offset)


def block_formula(block, x):
    shortcut = x
    if block.use_projection:
        shortcut = norm(block.proj_batchnorm, conv(block.proj_conv, x))
    for index, (layer, batch_norm) in enumerate(block.layers):
        x = norm(batch_norm, conv(layer, x if index == 0 else np.maximum(x, 0)))
    return np.maximum(x + shortcut, 0)


def max_pool(x):
    """3x3 with stride 2, over what is padded with zeros."""
    x = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    return windows[:, :, ::2, ::2].max((-1, -2))


def formula(net, x):
    x = np.maximum(norm(net.initial_batchnorm, conv(net.initial_conv, np.asarray(x))), 0)
    x = max_pool(x)
    for block in itertools.chain(*[group.blocks for group in net.block_groups]):
        x = block_formula(block, x)
    return x.mean((2, 3)) @ np.asarray(net.logits.weight) + np.asarray(net.logits.bias)


@pytest.mark.parametrize("make", [Tiny, TinyBottleneck])
def test_formula(make):
    net, x = filled(make, 2, 3).eval(), images(2, 2, 21, 16)
    expected = formula(net, x)
    assert_close(jax.jit(net)(x), expected, rtol=1e-4)
    assert np.ptp(expected, axis=0).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(
    "steps",
    [
        [ConvStep(3, 4, 2), ConvStep(3, 6, 1)],
        [ConvStep(1, 2, 1), ConvStep(3, 2, 2), ConvStep(1, 6, 1)],
    ],
)
def test_formula_of_a_block(steps):
    block, x = filled(ResnetBlock, 3, steps, use_projection=True).eval(), images(2, 3, 7, 6)
    expected = block_formula(block, np.asarray(x))
    assert_close(jax.jit(block)(x), expected, rtol=1e-5, atol=1e-5)


# --- what stands around the formula ----------------------------------------------------


def test_keys_are_drawn_in_order():
    """One seed gives the weights of PAX, which draws in this order."""
    steps = [ConvStep(1, 2, 1), ConvStep(3, 2, 1), ConvStep(1, 4, 1)]
    pax.seed_rng_key(9)
    block = ResnetBlock(3, steps, use_projection=True)
    pax.seed_rng_key(9)
    for layer in (block.proj_conv, *[layer for layer, _ in block.layers]):
        again = pax.Conv2D(layer.in_features, layer.out_features, layer.kernel_shape)
        assert (layer.weight == again.weight).all()


def test_keys_of_a_network_are_drawn_in_order():
    def ends():
        net = Tiny(1, 2, initial_conv_config={"kernel_shape": 1})
        return net.initial_conv.weight, net.logits.bias

    pax.seed_rng_key(9)
    weight, bias = jax.jit(ends)()
    after = pax.next_rng_key()
    pax.seed_rng_key(9)
    assert_close(weight, pax.Conv2D(1, 64, 1).weight, rtol=1e-5)
    for _ in range(4 + 3):  # two blocks without a projection, one with
        pax.next_rng_key()
    assert_close(bias, pax.Linear(128, 2).bias, rtol=1e-5)
    assert (after == pax.next_rng_key()).all()


def test_logits_start_at_zero_but_for_the_bias():
    logits = jax.jit(lambda: TinyBottleneck(1, 2).logits)()
    assert not logits.weight.any() and logits.bias.all()


def test_names():
    line = "(ResNet18) ResNet18(parameters=11181642, state=9640, mode=train)"
    assert repr(shapes(pax.nets.ResNet18, 3, 10)) == line

    class Mine(pax.nets.ResNet50):
        """A network of a user, which gets the name of what it is made of."""

    assert shapes(Mine, 3, 10).name == "ResNet50"


def test_summary():
    def conv(inputs, outputs, kernel, stride=""):
        padding = [(kernel // 2, kernel // 2)] * 2
        return (
            f"Conv2D(in_features={inputs}, out_features={outputs}, "
            f"kernel_shape={(kernel, kernel)}, padding={padding}, {stride}"
            "with_bias=False, data_format=NCHW)"
        )

    def norm(channels):
        return (
            f"BatchNorm2D(num_channels={channels}, create_scale=True, create_offset=True, "
            "data_format=NCHW, decay_rate=0.9)"
        )

    lines = shapes(pax.nets.ResNet50, 3, 10).summary(return_list=True)
    assert lines[:12] == [
        "(ResNet50) ResNet50",
        "├── initial_conv: (conv1) " + conv(3, 64, 7, "stride=(2, 2), "),
        "├── initial_batchnorm: (bn1) " + norm(64),
        "├── block_groups.0: BlockGroup",
        "│   ├── blocks.0: ResnetBlock",
        "│   │   ├── proj_conv: " + conv(64, 256, 1),
        "│   │   ├── proj_batchnorm: (proj_bn) " + norm(256),
        "│   │   ├── layers.0.0: (conv1) " + conv(64, 64, 1),
        "│   │   ├── layers.0.1: (bn1) " + norm(64),
        "│   │   ├── layers.1.0: (conv2) " + conv(64, 64, 3),
        "│   │   ├── layers.1.1: (bn2) " + norm(64),
        "│   │   ├── layers.2.0: (conv3) " + conv(64, 256, 1),
    ]
    assert lines[-1] == "└── logits: (fc) Linear(in_dim=2048, out_dim=10, with_bias=True)"


def norms(net):
    return [m for m in modules_and_leaves(net)[0] if isinstance(m, pax.BatchNorm2D)]


def test_train_mode_keeps_statistics_and_eval_mode_changes_nothing():
    net, x = filled(TinyBottleneck, 1, 2), images(2, 1, 16, 16)
    train = jax.jit(lambda net, x: net % x)
    updated, _ = train(net, x)
    for before, after in zip(norms(net), norms(updated), strict=True):
        assert (before.ema_mean.averages != after.ema_mean.averages).all()
    with refused(ValueError, "attribute"):
        net(x)
    evaluated, _ = train(updated.eval(), x)
    pairs = zip(*map(jax.tree_util.tree_leaves, (evaluated, updated)), strict=True)
    assert all((a == b).all() for a, b in pairs)


def test_configurations():
    net = shapes(
        pax.nets.ResNet18,
        1,
        10,
        logits_config={"with_bias": False, "w_init": jax.nn.initializers.ones},
        initial_conv_config={"kernel_shape": 3, "stride": 1, "padding": "SAME", "out_features": 8},
    )
    assert net.initial_conv.kernel_shape == (3, 3) and net.initial_conv.padding == "SAME"
    assert net.initial_batchnorm.num_channels == 8
    assert net.block_groups[0].blocks[0].layers[0][0].in_features == 8
    assert not hasattr(net.logits, "bias")


def test_a_configuration_is_not_changed():
    logits, initial = {"with_bias": False}, {"stride": 1}
    shapes(TinyBottleneck, 1, 2, logits, initial)
    assert logits == {"with_bias": False} and initial == {"stride": 1}


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (lambda: pax.nets.ResNet18(3, 10, logits_config={"name": "mine"}), TypeError,
         "where: ResNet18.logits_config"),
        (lambda: pax.nets.ResNet18(3, 10, initial_conv_config={"name": "mine"}), TypeError,
         "where: ResNet18.initial_conv_config"),
        (lambda: TinyBottleneck(3, 10, {"bias": False}), TypeError, "'bias'"),
        (lambda: pax.nets.ResNet50(3, 0), ValueError, "ResNet50.num_classes"),
        (lambda: pax.nets.ResNet18("3", 10), TypeError, "ResNet18.input_channels"),
        (lambda: TinyBottleneck(3, 10).eval()(images(2, 16, 16, 3)), ValueError,
         "(conv1) Conv2D"),  # the channels are last
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make, kind, name):
    with refused(kind, name):
        jax.eval_shape(make)
