"""Detection, segmentation, and images out of images."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.registry import between, model, real, weights


def _overlap(a, b):
    """The shares of boxes (y0, x0, y1, x1) that two sets have in common."""
    low = jnp.maximum(a[:, None, :2], b[None, :, :2])
    high = jnp.minimum(a[:, None, 2:], b[None, :, 2:])
    common = jnp.prod(jnp.clip(high - low, 0), axis=-1)
    size = lambda boxes: jnp.prod(boxes[:, 2:] - boxes[:, :2], axis=-1)  # noqa: E731
    return common / (size(a)[:, None] + size(b)[None] - common + 1e-9)


@model(
    "jax", between(0, 1, "batch, 20, 4"), between(0, 1, "batch, 20"), odd=("ties", "nan", "empty")
)
def nms():
    """Non-maximum suppression: the best box goes, and those that it covers, five times."""

    def one(boxes, scores):
        boxes = jnp.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], -1)
        covers = _overlap(boxes, boxes) > 0.3

        def pick(i, state):
            left, chosen, values = state
            best = jnp.argmax(left)
            value = left[best]
            chosen = chosen.at[i].set(jnp.where(value > 0.05, best, -1))
            return jnp.where(covers[best], -jnp.inf, left), chosen, values.at[i].set(value)

        start = (scores, jnp.zeros(5, jnp.int32), jnp.zeros(5))
        _, chosen, values = lax.fori_loop(0, 5, pick, start)
        return chosen, values, boxes[chosen]

    return {}, lambda params, boxes, scores: jax.vmap(one)(boxes, scores)


@model("jax", between(0, 1, "count, 4"), between(0, 1, "count"), odd=("ties",))
def nms_any_count():
    """The same with a symbolic number of boxes, in the order of their scores."""

    def apply(params, boxes, scores):
        boxes = jnp.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], -1)
        order = jnp.argsort(-scores)
        boxes, scores = boxes[order], scores[order]
        covers = jnp.triu(_overlap(boxes, boxes) > 0.5, 1)

        def step(i, keep):
            return jnp.where(covers[i] & keep[i], False, keep)

        keep = lax.fori_loop(0, boxes.shape[0], step, jnp.ones(boxes.shape[0], bool))
        return {"boxes": boxes, "scores": jnp.where(keep, scores, 0.0), "kept": keep.sum()}

    return {}, apply


@model("nnx", "batch, 24, 24, 3", differentiable=True)
def deeplab():
    from flax import nnx

    class DeepLab(nnx.Module):
        def __init__(self, rngs):
            self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
            self.rates = nnx.List(
                [nnx.Conv(8, 4, (3, 3), kernel_dilation=rate, rngs=rngs) for rate in (1, 2, 4)]
            )
            self.whole = nnx.Conv(8, 4, (1, 1), rngs=rngs)
            self.out = nnx.Conv(16, 5, (1, 1), rngs=rngs)

        def __call__(self, x):
            size = x.shape[:3]
            x = nnx.relu(self.stem(x))
            seen = self.whole(x.mean((1, 2), keepdims=True))
            parts = [rate(x) for rate in self.rates]
            parts.append(jnp.broadcast_to(seen, (*x.shape[:3], 4)))
            y = self.out(nnx.relu(jnp.concatenate(parts, -1)))
            y = jax.image.resize(y, (*size, 5), "bilinear")
            return {"logits": y, "classes": jnp.argmax(y, -1)}

    graph, state = nnx.split(DeepLab(nnx.Rngs(7)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


@model("haiku", "batch, 32, 32, 3", differentiable=True)
def feature_pyramid():
    import haiku as hk

    def forward(x):
        levels = []
        for width in (8, 16, 16):
            x = jax.nn.relu(hk.Conv2D(width, 3, stride=2)(x))
            levels.append(x)
        top, out = None, []
        for level in reversed(levels):
            side = hk.Conv2D(8, 1)(level)
            if top is not None:
                side = side + jnp.repeat(jnp.repeat(top, 2, 1), 2, 2)
            top = side
            out.append(hk.Conv2D(4, 3)(side).reshape(x.shape[0], -1, 4))
        return jnp.concatenate(out, axis=1)

    net = hk.without_apply_rng(hk.transform(forward))
    return net.init(jax.random.key(1), jnp.zeros((1, 32, 32, 3))), net.apply


@model("jax", "batch, 4, 4, 21", odd=("nan", "empty"))
def yolo_decode():
    """Boxes out of the grid of a detector, the best eight of each image."""
    anchors = jnp.array([[1.0, 2.0], [2.0, 1.0], [1.5, 1.5]])

    def apply(params, raw):
        raw = raw.reshape(raw.shape[0], 4, 4, 3, 7)
        cells = jnp.stack(jnp.meshgrid(jnp.arange(4), jnp.arange(4), indexing="ij"), -1)
        centre = (jax.nn.sigmoid(raw[..., :2]) + cells[:, :, None]) / 4
        size = jnp.exp(jnp.clip(raw[..., 2:4], -4, 4)) * params["anchors"] / 4
        score = jax.nn.sigmoid(raw[..., 4:5]) * jax.nn.softmax(raw[..., 5:])
        boxes = jnp.concatenate([centre - size / 2, centre + size / 2], -1)
        boxes = boxes.reshape(boxes.shape[0], -1, 4)
        score = score.reshape(score.shape[0], -1, 2)
        best, where = lax.top_k(score.max(-1), 8)
        found = jnp.take_along_axis(boxes, where[..., None], axis=1)
        kind = jnp.take_along_axis(score.argmax(-1), where, axis=1)
        return {"boxes": found, "scores": best, "classes": kind}

    return {"anchors": anchors}, apply


@model("jax", "batch, 12, 12, 4", between(0, 6, "batch, 3, 4"), differentiable=True)
def roi_align():
    """Features of boxes, by bilinear interpolation at points between pixels."""

    def sample(image, y, x):
        y0, x0 = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
        fy, fx = (y - y0)[..., None], (x - x0)[..., None]
        at = lambda i, j: image[jnp.clip(i, 0, 11), jnp.clip(j, 0, 11)]  # noqa: E731
        top = at(y0, x0) * (1 - fx) + at(y0, x0 + 1) * fx
        low = at(y0 + 1, x0) * (1 - fx) + at(y0 + 1, x0 + 1) * fx
        return top * (1 - fy) + low * fy

    def box(image, corner):
        steps = (jnp.arange(3) + 0.5) / 3
        y = corner[0] + steps * corner[2]
        x = corner[1] + steps * corner[3]
        grid = jnp.meshgrid(y, x, indexing="ij")
        return sample(image, *grid)

    w = weights(8)

    def apply(params, features, boxes):
        crops = jax.vmap(lambda image, some: jax.vmap(lambda b: box(image, b))(some))(
            features, boxes
        )
        return crops.reshape(*crops.shape[:2], -1) @ params["head"]

    return {"head": w(36, 5)}, apply


@model("linen", "batch, height, width, 3", differentiable=True)
def super_resolution():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.tanh(nn.Conv(8, (5, 5))(x))
            h = nn.Conv(12, (3, 3))(h)
            b, height, width, _ = h.shape
            h = h.reshape(b, height, width, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
            return jnp.clip(h.reshape(b, 2 * height, 2 * width, 3), 0, 1)

    net = Net()
    return net.init(jax.random.key(3), jnp.zeros((1, 8, 8, 3))), net.apply


@model("jax", "batch, 8, 8, 3", real("batch, 8, 8, 2", scale=2.0), differentiable=True)
def flow_warp():
    """An image pulled along an optical flow, by `map_coordinates`."""

    def one(image, flow):
        grid = jnp.stack(jnp.meshgrid(jnp.arange(8.0), jnp.arange(8.0), indexing="ij"))
        at = grid + flow.transpose(2, 0, 1)
        pull = lambda c: jax.scipy.ndimage.map_coordinates(c, list(at), order=1, mode="nearest")  # noqa: E731
        return jax.vmap(pull, -1, -1)(image)

    return {"gain": jnp.ones(3)}, lambda p, image, flow: jax.vmap(one)(image, flow) * p["gain"]


@model("equinox", "batch, 2, 8, 8", differentiable=True)
def stereo_costs():
    """Costs of shifts between two images, and a soft minimum of them."""
    import equinox as eqx

    class Stereo(eqx.Module):
        encode: eqx.nn.Sequential

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.encode = eqx.nn.Sequential(
                [
                    eqx.nn.Conv2d(1, 4, 3, padding=1, key=a),
                    eqx.nn.Lambda(jax.nn.elu),
                    eqx.nn.Conv2d(4, 4, 3, padding=1, key=b),
                ]
            )

        def __call__(self, pair):
            left, right = self.encode(pair[:1]), self.encode(pair[1:])
            shifted = [jnp.pad(right, ((0, 0), (0, 0), (d, 0)))[:, :, :8] for d in range(4)]
            costs = jnp.stack([jnp.abs(left - each).sum(0) for each in shifted])
            return (jax.nn.softmax(-costs, axis=0) * jnp.arange(4.0)[:, None, None]).sum(0)

    arrays, rest = eqx.partition(Stereo(jax.random.key(9)), eqx.is_array)
    return arrays, lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)
