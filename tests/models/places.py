"""Models of places: grids and rays that are sampled, hashes of cells, points, pixels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.models.registry import between, ints, model, real, weights


def _bilinear(image, x, y):
    """An image at places between its pixels, zero outside."""
    height, width, _ = image.shape
    left, top = jnp.floor(x), jnp.floor(y)
    total = 0.0
    for right, down in ((0, 0), (0, 1), (1, 0), (1, 1)):
        column, row = left + right, top + down
        share = (1 - jnp.abs(x - column)) * (1 - jnp.abs(y - row))
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        column = jnp.clip(column, 0, width - 1).astype(jnp.int32)
        row = jnp.clip(row, 0, height - 1).astype(jnp.int32)
        total = total + jnp.where(inside, share, 0.0)[..., None] * image[row, column]
    return total


@model("jax", "batch, height, width, 2", differentiable=True, odd=("empty",))
def spatial_transformer():
    """A net says how an image is turned, moved and stretched; the result has a fixed size."""
    w = weights(1)
    params = {"look": w(3, 3, 2, 6), "say": w(6, 6, scale=0.1), "rest": jnp.eye(2, 3).ravel()}

    def apply(p, image):
        seen = lax.conv_general_dilated(
            image, p["look"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        turn = (jnp.tanh(seen.mean((1, 2))) @ p["say"] + p["rest"]).reshape(-1, 2, 3)
        line = jnp.linspace(-1.0, 1.0, 5)
        grid = jnp.stack([*jnp.meshgrid(line, line), jnp.ones((5, 5))], -1)
        at = jnp.einsum("bij,yxj->byxi", turn, grid)
        height, width = image.shape[1:3]
        x, y = (at[..., 0] + 1) / 2 * (width - 1), (at[..., 1] + 1) / 2 * (height - 1)
        return jax.vmap(_bilinear)(image, x, y), turn

    return params, apply


@model("jax", "batch, height, width, 3", differentiable=True, odd=("empty",))
def deformable_convolution():
    """Each of nine taps goes where another convolution says, with a weight of its own."""
    w = weights(2)
    params = {"move": w(3, 3, 3, 27, scale=0.1), "w": w(9, 3, 4), "b": w(4)}
    taps = jnp.asarray([(i, j) for i in (-1.0, 0, 1) for j in (-1.0, 0, 1)])

    def apply(p, image):
        said = lax.conv_general_dilated(
            image, p["move"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        down, right, gate = jnp.split(said, 3, axis=-1)
        height, width = image.shape[1:3]
        y = jnp.arange(height, dtype=jnp.float32)[:, None, None] + taps[:, 0] + down
        x = jnp.arange(width, dtype=jnp.float32)[None, :, None] + taps[:, 1] + right
        found = jax.vmap(_bilinear)(image, x, y) * jax.nn.sigmoid(gate)[..., None]
        return jnp.einsum("bhwtc,tco->bhwo", found, p["w"]) + p["b"]

    return params, apply


@model("jax", between(0, 1, "points, 2"), differentiable=True, odd=("ties",))
def hash_grid():
    """Colours of places from tables at four finenesses, found by hashes of cells."""
    w = weights(3)
    params = {"tables": w(4, 32, 2, scale=0.5), "a": w(8, 8), "b": w(8, 3)}
    primes = np.array([1, 2654435761], np.uint32)

    def apply(p, at):
        found = []
        for level, size in enumerate((4, 7, 12, 20)):
            place = at * size
            cell = jnp.floor(place)
            inside, cell = place - cell, cell.astype(jnp.uint32)
            total = 0.0
            for corner in np.ndindex(2, 2):
                mixed = (cell + jnp.asarray(corner, jnp.uint32)) * primes
                hashed = (mixed[:, 0] ^ mixed[:, 1]) % jnp.uint32(32)
                share = jnp.where(jnp.asarray(corner, bool), inside, 1 - inside).prod(-1)
                total = total + share[:, None] * p["tables"][level][hashed]
            found.append(total)
        return jax.nn.sigmoid(jax.nn.relu(jnp.concatenate(found, -1) @ p["a"]) @ p["b"])

    return params, apply


@model("jax", real("rays, 3", scale=0.3), real("rays, 3"), differentiable=True)
def radiance_field():
    """Colours along rays, coarse first, then where something was found."""
    w = weights(4)
    params = {"a": w(18, 16), "b": w(16, 16), "density": w(16, 1), "colour": w(19, 3)}

    def field(p, at, towards):
        turned = at[..., None] * 2.0 ** jnp.arange(3)
        seen = jnp.concatenate([jnp.sin(turned), jnp.cos(turned)], -1)
        h = jax.nn.relu(seen.reshape(*at.shape[:-1], 18) @ p["a"])
        h = jax.nn.relu(h @ p["b"])
        both = jnp.concatenate([h, jnp.broadcast_to(towards[:, None], at.shape)], -1)
        return jax.nn.softplus(h @ p["density"])[..., 0], jax.nn.sigmoid(both @ p["colour"])

    def along(p, start, towards, depth):
        at = start[:, None] + towards[:, None] * depth[..., None]
        density, colour = field(p, at, towards)
        step = jnp.diff(depth, axis=-1, append=depth[:, -1:] + 1.0)
        stopped = 1 - jnp.exp(-density * step)
        through = jnp.cumprod(1 - stopped + 1e-10, axis=-1)
        through = jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], -1)
        share = stopped * through
        return share, (share[..., None] * colour).sum(1)

    def finer(depth, share):
        low = jnp.cumsum(share + 1e-3, axis=-1)
        low = lax.stop_gradient(low / low[:, -1:])
        wanted = jnp.linspace(0.05, 0.95, 6)
        place = jax.vmap(lambda row: jnp.searchsorted(row, wanted))(low)
        more = jnp.take_along_axis(depth, jnp.minimum(place, depth.shape[1] - 1), axis=1)
        return jnp.sort(jnp.concatenate([depth, more + 0.01 * wanted], -1), axis=-1)

    def apply(p, start, towards):
        towards = towards / jnp.sqrt((towards**2).sum(-1, keepdims=True) + 1e-6)
        depth = jnp.broadcast_to(jnp.linspace(0.5, 3.0, 8), (start.shape[0], 8))
        share, coarse = along(p, start, towards, depth)
        depth = finer(depth, share)
        share, fine = along(p, start, towards, depth)
        return {"coarse": coarse, "fine": fine, "depth": (share * depth).sum(-1)}

    return params, apply


@model("jax", "batch, points, 3", constraints=("points >= 4",))
def farthest_points():
    """Four points far from one another, and for each its three nearest."""
    w = weights(5)

    def one(p, points):
        def step(state, _):
            apart, last = state
            apart = jnp.minimum(apart, ((points - points[last]) ** 2).sum(-1))
            return (apart, jnp.argmax(apart)), last

        start = (jnp.full(points.shape[0], jnp.inf), jnp.argmin(points[:, 0]))
        _, chosen = lax.scan(step, start, None, length=4)
        centres = points[chosen]
        apart = ((centres[:, None] - points[None]) ** 2).sum(-1)
        _, near = lax.top_k(-apart, 3)
        relative = points[near] - centres[:, None]
        return chosen, jax.nn.relu(relative @ p["w"]).max(1)

    return {"w": w(3, 8)}, lambda p, x: jax.vmap(lambda points: one(p, points))(x)


@model("jax", ints(256, "batch, height, width"), odd=("empty",))
def equalized_histogram():
    """Grey values spread evenly, with counts by scatter and a table for each image."""

    def one(p, image):
        flat = image.reshape(-1)
        counts = jnp.zeros(256, jnp.int32).at[flat].add(1)
        below = jnp.cumsum(counts)
        first = below[jnp.argmax(counts > 0)]
        table = jnp.round((below - first) * 255 / jnp.maximum(flat.size - first, 1))
        table = jnp.clip(table, 0, 255).astype(jnp.uint8)
        shades = jnp.digitize(table[image].astype(jnp.float32), p["levels"])
        return table[image], shades

    return {"levels": jnp.array([64.0, 128, 192])}, lambda p, x: jax.vmap(lambda i: one(p, i))(x)


@model("jax", between(0, 1, "height, width"), odd=("ties",))
def connected_parts():
    """What hangs together gets one number: the largest goes from pixel to pixel until it rests."""

    def apply(p, image):
        height, width = image.shape
        full = image > p["level"]
        labels = jnp.arange(1, height * width + 1).reshape(height, width) * full

        def spread(state):
            labels, _ = state
            most = lax.reduce_window(labels, 0, lax.max, (3, 3), (1, 1), "SAME")
            new = jnp.where(full, most, 0)
            return new, jnp.any(new != labels)

        labels, _ = lax.while_loop(lambda state: state[1], spread, (labels, jnp.bool_(True)))
        sizes = jax.ops.segment_sum(jnp.ones(height * width), labels.reshape(-1), 100)
        return labels, sizes[1:].max()

    return {"level": jnp.float32(0.5)}, apply


@model("jax", "batch, 4, 2", "batch, 4, 2", differentiable=True, odd=("empty",))
def homography():
    """The map of four corners to four others, by a system of eight equations, and a place in it."""

    def one(p, source, target):
        x, y, u, v = source[:, 0], source[:, 1], target[:, 0], target[:, 1]
        none, ones = jnp.zeros(4), jnp.ones(4)
        first = jnp.stack([x, y, ones, none, none, none, -u * x, -u * y], -1)
        second = jnp.stack([none, none, none, x, y, ones, -v * x, -v * y], -1)
        rows = jnp.concatenate([first, second])
        solved = jnp.linalg.solve(rows.T @ rows + 0.1 * jnp.eye(8), rows.T @ jnp.r_[u, v])
        full = jnp.append(solved, 1.0).reshape(3, 3)
        moved = full @ jnp.append(p["at"], 1.0)
        return moved[:2] / (moved[2] ** 2 + 1.0), jnp.linalg.det(full)

    return {"at": jnp.array([0.2, 0.3])}, lambda p, a, b: jax.vmap(lambda x, y: one(p, x, y))(a, b)


@model("jax", "batch, height, width", constraints=("height >= 3", "width >= 3"))
def median_filter():
    """Medians of neighbourhoods, edges by Sobel, and thin ones by their neighbours."""

    def apply(p, x):
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1)), mode="edge")
        height, width = x.shape[1:]
        near = jnp.stack(
            [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)], -1
        )
        middle = jnp.median(near, axis=-1)
        down = (near * p["down"]).sum(-1)
        right = (near * p["down"].reshape(3, 3).T.reshape(9)).sum(-1)
        size, angle = jnp.hypot(down, right), jnp.arctan2(down, right)
        sector = jnp.round(angle / (jnp.pi / 4)).astype(jnp.int32) % 4
        peaks = lax.reduce_window(size, -jnp.inf, lax.max, (1, 3, 3), (1, 1, 1), "SAME")
        return middle, jnp.where(size >= peaks, size, 0.0), sector

    return {"down": jnp.array([1.0, 2, 1, 0, 0, 0, -1, -2, -1])}, apply
