"""Images to classes and features."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.registry import between, model, weights


def _pixels(channels: int = 3, size: int = 32):
    return f"batch, {size}, {size}, {channels}"


@model("nnx", _pixels(), differentiable=True)
def resnet():
    from flax import nnx

    class Bottleneck(nnx.Module):
        def __init__(self, inside, outside, stride, rngs):
            width = outside // 4
            conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
            norm = functools.partial(nnx.BatchNorm, use_running_average=True, rngs=rngs)
            self.reduce, self.norm1 = conv(inside, width, (1, 1)), norm(width)
            self.space = conv(width, width, (3, 3), strides=stride)
            self.norm2 = norm(width)
            self.expand, self.norm3 = conv(width, outside, (1, 1)), norm(outside)
            self.short = conv(inside, outside, (1, 1), strides=stride)

        def __call__(self, x):
            h = nnx.relu(self.norm1(self.reduce(x)))
            h = nnx.relu(self.norm2(self.space(h)))
            return nnx.relu(self.norm3(self.expand(h)) + self.short(x))

    class ResNet(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, 8, (7, 7), strides=2, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.block1 = Bottleneck(8, 16, 1, rngs)
            self.block2 = Bottleneck(16, 32, 2, rngs)
            self.head = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            x = self.block2(self.block1(x))
            return self.head(x.mean(axis=(1, 2)))

    graph, state = nnx.split(ResNet(nnx.Rngs(0)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


@model("linen", _pixels(), differentiable=True)
def convnext():
    import flax.linen as nn

    class Block(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x):
            h = nn.Conv(self.width, (7, 7), feature_group_count=self.width)(x)
            h = nn.Dense(4 * self.width)(nn.LayerNorm(epsilon=1e-6)(h))
            h = nn.Dense(self.width)(nn.gelu(h))
            scale = self.param("scale", nn.initializers.constant(0.1), (self.width,))
            return x + scale * h

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm(epsilon=1e-6)(nn.Conv(8, (4, 4), strides=(4, 4))(x))
            x = Block(8)(x)
            x = nn.Conv(16, (2, 2), strides=(2, 2))(nn.LayerNorm(epsilon=1e-6)(x))
            x = Block(16)(x)
            return nn.Dense(10)(nn.LayerNorm(epsilon=1e-6)(x.mean((1, 2))))

    net = ConvNeXt()
    return net.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3))), net.apply


def _conv(x, kernel, stride=1, groups=1, padding="SAME", dilation=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@model("jax", _pixels(), differentiable=True)
def mobilenet():
    w = weights(1)

    def block(inside, outside, stride):
        wide = 2 * inside
        return {
            "expand": w(1, 1, inside, wide),
            "depth": w(3, 3, 1, wide),
            "squeeze": w(wide, 4),
            "excite": w(4, wide),
            "project": w(1, 1, wide, outside),
        }

    shapes = [(8, 8, 1), (8, 16, 2), (16, 16, 1)]
    params = {"stem": w(3, 3, 3, 8), "blocks": [block(*each) for each in shapes], "head": w(16, 10)}

    def inverted(p, x, stride):
        h = jax.nn.hard_swish(_conv(x, p["expand"]))
        h = jax.nn.hard_swish(_conv(h, p["depth"], stride, groups=h.shape[-1]))
        gate = jax.nn.relu6(h.mean((1, 2)) @ p["squeeze"]) @ p["excite"]
        h = _conv(h * jax.nn.hard_sigmoid(gate)[:, None, None, :], p["project"])
        return h + x if h.shape == x.shape else h

    def apply(params, x):
        x = jax.nn.hard_swish(_conv(x, params["stem"], 2))
        for p, (_, _, stride) in zip(params["blocks"], shapes):
            x = inverted(p, x, stride)
        return jax.nn.softmax(x.mean((1, 2)) @ params["head"])

    return params, apply


@model(
    "nnx",
    "batch, 4*h, 4*w, 3",
    sizes=[
        {"batch": 2, "h": 4, "w": 4},
        {"batch": 1, "h": 6, "w": 3},
        {"batch": 3, "h": 2, "w": 5},
    ],
    differentiable=True,
)
def unet():
    from flax import nnx

    class Twice(nnx.Module):
        def __init__(self, inside, outside, rngs):
            self.a = nnx.Conv(inside, outside, (3, 3), rngs=rngs)
            self.b = nnx.Conv(outside, outside, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(outside, num_groups=2, rngs=rngs)

        def __call__(self, x):
            return nnx.silu(self.norm(self.b(nnx.silu(self.a(x)))))

    class UNet(nnx.Module):
        def __init__(self, rngs):
            self.down1, self.down2 = Twice(3, 4, rngs), Twice(4, 8, rngs)
            self.middle = Twice(8, 16, rngs)
            self.up2 = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
            self.join2 = Twice(16, 8, rngs)
            self.up1 = nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), rngs=rngs)
            self.join1 = Twice(8, 4, rngs)
            self.out = nnx.Conv(4, 2, (1, 1), rngs=rngs)

        def __call__(self, x):
            half = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
            one = self.down1(x)
            two = self.down2(half(one))
            low = self.middle(half(two))
            h = self.join2(jnp.concatenate([self.up2(low), two], -1))
            return self.out(self.join1(jnp.concatenate([self.up1(h), one], -1)))

    graph, state = nnx.split(UNet(nnx.Rngs(1)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


@model("linen", _pixels(), differentiable=True)
def vit():
    import flax.linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
            h = nn.Dense(32)(nn.LayerNorm()(x))
            return x + nn.Dense(16)(nn.gelu(h))

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(16, (8, 8), strides=(8, 8))(x)
            x = x.reshape(x.shape[0], -1, 16)
            token = self.param("cls", nn.initializers.normal(0.02), (1, 1, 16))
            x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 16)), x], axis=1)
            x = x + self.param("positions", nn.initializers.normal(0.02), (1, 17, 16))
            for _ in range(2):
                x = Encoder()(x)
            return nn.Dense(10)(nn.LayerNorm()(x)[:, 0])

    net = ViT()
    return net.init(jax.random.key(2), jnp.zeros((1, 32, 32, 3))), net.apply


@model("jax", _pixels(8, 16), differentiable=True)
def swin():
    w = weights(3)
    window, heads, width = 4, 2, 8

    def block():
        return {
            "qkv": w(width, 3 * width),
            "out": w(width, width),
            "bias": w((2 * window - 1) ** 2, heads, scale=0.1),
            "in": w(width, 2 * width),
            "back": w(2 * width, width),
        }

    params = {"blocks": [block(), block()], "merge": w(4 * width, 16), "head": w(16, 10)}
    places = jnp.stack(jnp.meshgrid(jnp.arange(window), jnp.arange(window), indexing="ij"), -1)
    places = places.reshape(-1, 2)
    apart = places[:, None] - places[None] + window - 1
    index = apart[..., 0] * (2 * window - 1) + apart[..., 1]

    def norm(x):
        return jax.nn.standardize(x, axis=-1, epsilon=1e-5)

    def regions(size, shift):
        """Which part of a rolled image each window holds: none sees over the seam."""
        row = jnp.zeros(size, jnp.int32).at[-window:-shift].set(1).at[-shift:].set(2)
        return row[:, None] * 3 + row[None]

    def cut(x):
        b, h, v, c = x.shape
        x = x.reshape(b, h // window, window, v // window, window, c)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, window * window, c)

    def join(x, b, h, v):
        x = x.reshape(b, h // window, v // window, window, window, -1)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, v, -1)

    def attention(p, x, shift):
        b, h, v, c = x.shape
        if shift:
            x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
        tiles = cut(x)
        q, k, value = jnp.split(tiles @ p["qkv"], 3, axis=-1)
        q, k, value = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, value))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (c // heads) ** -0.5
        scores = scores + p["bias"][index].transpose(2, 0, 1)
        if shift:
            part = cut(regions(h, shift)[None, :, :, None])[..., 0]
            seen = part[:, :, None] == part[:, None, :]
            scores = scores.reshape(b, -1, *scores.shape[1:])
            scores = jnp.where(seen[None, :, None], scores, -1e9)
            scores = scores.reshape(-1, *scores.shape[2:])
        mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value)
        x = join(mixed.reshape(*tiles.shape) @ p["out"], b, h, v)
        return jnp.roll(x, (shift, shift), axis=(1, 2)) if shift else x

    def apply(params, x):
        for p, shift in zip(params["blocks"], (0, 2)):
            x = x + attention(p, norm(x), shift)
            x = x + jax.nn.gelu(norm(x) @ p["in"]) @ p["back"]
        quarters = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        x = norm(jnp.concatenate(quarters, -1)) @ params["merge"]
        return x.mean((1, 2)) @ params["head"]

    return params, apply


@model("equinox", "batch, 3, 16, 16", differentiable=True)
def mlp_mixer():
    import equinox as eqx

    class Mixer(eqx.Module):
        patches: eqx.nn.MLP
        channels: eqx.nn.MLP
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.patches = eqx.nn.MLP(16, 16, 24, 1, activation=jax.nn.gelu, key=a)
            self.channels = eqx.nn.MLP(8, 8, 24, 1, activation=jax.nn.gelu, key=b)
            self.norm1, self.norm2 = eqx.nn.LayerNorm((8, 16)), eqx.nn.LayerNorm((8, 16))

        def __call__(self, y):
            y = y + jax.vmap(self.patches)(self.norm1(y))
            return y + jax.vmap(self.channels, 1, 1)(self.norm2(y))

    class Net(eqx.Module):
        cut: eqx.nn.Conv2d
        blocks: list
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.cut = eqx.nn.Conv2d(3, 8, 4, stride=4, key=keys[0])
            self.blocks = [Mixer(keys[1]), Mixer(keys[2])]
            self.head = eqx.nn.Linear(8, 10, key=keys[3])

        def __call__(self, x):
            y = self.cut(x).reshape(8, 16)
            for block in self.blocks:
                y = block(y)
            return self.head(y.mean(-1))

    arrays, rest = eqx.partition(Net(jax.random.key(4)), eqx.is_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)


@model("haiku", _pixels(), differentiable=True)
def densenet():
    import haiku as hk

    def forward(x, training):
        x = hk.Conv2D(8, 3, stride=2)(x)
        for _ in range(3):
            h = hk.BatchNorm(True, True, 0.9)(x, is_training=training)
            x = jnp.concatenate([x, hk.Conv2D(4, 3)(jax.nn.relu(h))], -1)
        x = hk.AvgPool((2, 2, 1), (2, 2, 1), "VALID")(x)
        return hk.Linear(10)(hk.Flatten()(x))

    net = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = net.init(jax.random.key(5), jnp.ones((2, 32, 32, 3)), True)
    return (params, state), lambda both, x: net.apply(*both, x, False)[0]


@model("jax", "batch, 8, 8, 2", "batch, 3, 3, 2, 4", differentiable=True)
def dynamic_filters():
    """Every image has a kernel of its own, which a hyper-network made."""
    w = weights(6)

    def apply(params, images, kernels):
        one = lambda image, kernel: _conv(image[None], kernel)[0]  # noqa: E731
        return jax.nn.relu(jax.vmap(one)(images, kernels)) @ params["out"]

    return {"out": w(4, 3)}, apply


@model("pax", _pixels(1, 16), differentiable=True)
def pax_digits():
    import pax_export as pax

    pax.seed_rng_key(3)
    return pax.Sequential(
        pax.Conv2D(1, 8, 3),
        pax.BatchNorm2D(8),
        jax.nn.relu,
        lambda x: pax.max_pool(x, (2, 2, 1), (2, 2, 1), "SAME"),
        pax.Conv2D(8, 8, 3, stride=2),
        jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1),
        pax.Linear(128, 10),
    ).eval()


@model("jax", between(0, 255, _pixels()), "batch, 2", odd=("ties", "nan", "extreme", "empty"))
def preprocess_images():
    """What stands before a classifier: crops at places that come along, flips, standardising."""

    def apply(params, images, corners):
        starts = jnp.clip(jnp.round(corners * 4 + 4), 0, 8).astype(jnp.int32)
        crop = lambda image, at: lax.dynamic_slice(image, (at[0], at[1], 0), (24, 24, 3))  # noqa: E731
        x = jax.vmap(crop)(images, starts)
        x = jnp.where((corners[:, 0] > 0)[:, None, None, None], x[:, :, ::-1], x)
        x = (x / 255.0 - params["mean"]) / params["std"]
        return jnp.clip(jax.image.resize(x, (x.shape[0], 16, 16, 3), "bilinear"), -3, 3)

    return {"mean": jnp.array([0.48, 0.45, 0.4]), "std": jnp.array([0.22, 0.22, 0.23])}, apply
