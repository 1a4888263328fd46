"""Files whose arrays are kept otherwise than the module has them: adopted right, or refused.

One leaf may hold the layers of several arrays, or queries, keys and values that are three; and a
weight may be kept as a direction and a length.  The truth is drawn first, written as a framework
would, renamed and broken by the changes of `test_adoption`, and compared leaf by leaf.
"""

from __future__ import annotations

import collections
import random as chance

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export import transforms as T
from pax_export.core import named_leaves
from tests.closeness import is_close
from tests.hard.size import runs
from tests.hard.test_adoption import BROKEN, HARMLESS, SILENT
from tests.weights.adoption.foreign import Free


class _Attention(pax.Module):
    def __init__(self, size, heads, qkv):
        super().__init__()
        self.num_heads, self.qkv = heads, qkv


def _drawn(draw):
    """Sizes, the true numbers of every layer: in x out, queries, keys and values apart; heads."""
    numbers = np.random.default_rng(draw.randrange(10**9))
    count, size = draw.choice([1, 2, 3, 4]), draw.choice([2, 4, 6])
    wide = draw.choice([size, size, 3, 2 * size, 3 * size])
    shapes = {"up.w": (size, wide), "up.b": (wide,), "down.w": (wide, size), "down.b": (size,),
              "norm.w": (size,), "norm.b": (size,)}  # fmt: skip
    heads = draw.choice([count for count in (1, 2, 4, 6) if size % count == 0])
    keys = draw.choice([count for count in (1, 2, 3, 4, 6) if heads % count == 0])
    for part in "qkv":
        own = size if part == "q" else size // heads * keys
        shapes |= {f"{part}.w": (size, own), f"{part}.b": (own,)}
    layers = [
        {name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(count)
    ]
    return count, size, wide, layers, heads, keys


def _fused(parts, order, heads, keys):
    if order == "blocks":
        return np.concatenate(parts, -1)
    q, k, v = (np.split(part, n, -1) for part, n in zip(parts, (heads, keys, keys)))
    each = heads // keys
    return np.concatenate(
        [a for n in range(keys) for a in (*q[n * each : (n + 1) * each], k[n], v[n])], -1
    )


def _block(size, wide, heads, keys):
    qkv = pax.Linear(size, size + 2 * (size // heads) * keys)
    return Free(norm=pax.LayerNorm(size, -1, True, True), up=pax.Linear(size, wide),
                down=pax.Linear(wide, size), attention=_Attention(size, heads, qkv))  # fmt: skip


def _leaves(layer, order, heads, keys):
    """What one block of ours holds, by path."""
    found = {
        f"{at}.{k}": layer[f"{at}.{k[0]}"] for at in ("up", "down") for k in ("weight", "bias")
    }
    found |= {"norm.scale": layer["norm.w"], "norm.offset": layer["norm.b"]}
    for k, name in (("w", "weight"), ("b", "bias")):
        parts = [layer[f"{part}.{k}"] for part in "qkv"]
        found[f"attention.qkv.{name}"] = _fused(parts, order, heads, keys)
    return found


def _written(layers, framework, draw, normed):
    """What a framework keeps of these layers."""
    list_name = draw.choice(["layers", "blocks", "encoder.layers", "h"])
    words = draw.choice([("attn.q_proj", "attn.k_proj", "attn.v_proj"),
                         ("attention.query", "attention.key", "attention.value")])  # fmt: skip
    names = {"up": "mlp.up", "down": "mlp.down", "norm": "norm", **dict(zip("qkv", words))}
    file = {}
    for i, layer in enumerate(layers):
        for name, array in layer.items():
            at, k = name.split(".")
            if framework == "flax":
                key = f"params/{list_name.replace('.', '/')}_{i}/{names[at].replace('.', '/')}"
                role = {"w": "scale" if at == "norm" else "kernel", "b": "bias"}[k]
                file[f"{key}/{role}"] = array
                continue
            key = f"{list_name}.{i}.{names[at]}.{'weight' if k == 'w' else 'bias'}"
            array = array.T if array.ndim == 2 else array
            if normed and array.ndim == 2 and draw.random() < 0.7:
                axis = draw.choice([0, 1])
                length = np.sqrt(np.square(array).sum(axis, keepdims=True))
                more = np.float32(draw.choice([0.5, 1.0, 3.0]))
                if draw.random() < 0.5:
                    file |= {f"{key}_g": length, f"{key}_v": more * array}
                else:
                    key = key.replace(".weight", ".parametrizations.weight.original")
                    file |= {f"{key}0": length, f"{key}1": more * array}
            else:
                file[key] = array
    return file


def tried(seed):
    """What became of one file: right, refused or wrong, and how it was changed."""
    draw = chance.Random(seed)
    count, size, wide, layers, heads, keys = _drawn(draw)
    order = draw.choice(["blocks", "by head"])
    framework = draw.choice(["torch", "torch", "flax"])
    file = _written(layers, framework, draw, draw.random() < 0.5)
    blocks = [_leaves(layer, order, heads, keys) for layer in layers]
    form = draw.choice(["list", "stack", "scan", "net", "own"])
    modules = [_block(size, wide, heads, keys) for _ in range(count)]
    stacked = T.stack_layers(modules)
    if form == "own":
        stacked = jax.tree_util.tree_map(lambda leaf: leaf, stacked)
        stacked = stacked.replace(
            up=Free(w=jnp.ones((count, size, wide)), b=jnp.ones((count, wide))))  # fmt: skip
    if form == "scan":
        inner = T.Vmap(_block, axis_size=count)(size, wide, heads, keys)
        net, at = Free(body=inner), "body.vmap_module."
    elif form == "list":
        net, at = Free(layers=modules), None
    elif form == "net":
        net, at = stacked, ""
    else:
        net, at = Free(layers=stacked), "layers."
    change = draw.choice(HARMLESS * 2 + SILENT + BROKEN)
    file = change(file, draw)
    options = {}
    if draw.random() < 0.7:
        options["fused"] = order
    if draw.random() < 0.7:
        options["origin"] = framework
    try:
        new, _ = pax.weights.adopt(net, file, **options)
    except pax.errors.AdoptionError:
        return change, "refused", form
    found = dict(named_leaves(new))
    for i, block in enumerate(blocks):
        for name, expected in block.items():
            if at is None:
                value = found[f"layers.{i}.{name}"]
            else:
                own = form == "own" and name.startswith("up.")
                name = name.replace("weight", "w").replace("bias", "b") if own else name
                value = found[f"{at}{name}"][i]
            if not is_close(np.asarray(value), expected, rtol=1e-5):
                return change, "wrong", form
    return change, "right", form


def test_arrays_kept_otherwise_are_adopted_right_or_refused():
    count = collections.Counter()
    for seed in range(runs(short=15, long=2000)):
        change, result, form = tried(seed)
        assert result != "wrong", (seed, change.__name__, form)
        count[result] += change in HARMLESS
    assert count["right"] > count["refused"] / 2  # what refuses everything would prove nothing
