"""SmolLM2 with drawn weights, 6 of its 30 layers: a prompt is read, and one token after another.

Beside the same net in torch, whose cache grows by what is read, as optimum exports it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn as tn

import pax_export as pax

LAYERS, DIM, HEADS, PAIRS, SIZE, HIDDEN, VOCAB = 6, 576, 9, 3, 64, 1536, 49152
#: How many tokens the cache has room for, and a prompt has.
ROOM, PROMPT = 256, 64


def model() -> Any:
    """The net in jax, in float32."""
    config = pax.nets.DecoderConfig(
        VOCAB, DIM, LAYERS, HEADS, PAIRS, SIZE, HIDDEN, tied=True, rotary_base=1e5
    )
    return pax.nets.Decoder(config).eval()


def write(path: str, kind: str, batch: int | str) -> list[Any]:
    """Writes the file of a kind, ``"prefill"`` or ``"decode"``; gives what it is called with."""
    lm = model()
    length = "length" if isinstance(batch, str) else PROMPT
    pax.generation.export(
        lm, path, format="onnx", signatures=[kind], max_length=ROOM, batch=batch, length=length,
        validate=False, card=False,
    )  # fmt: skip
    cache = lm.init_cache(1, ROOM, listed=True)
    if kind == "decode":
        cache = cache.with_lengths(np.full(1, ROOM - 1, np.int32))
        return [np.full(1, 7, np.int32), *map(np.asarray, jax.tree.leaves(cache))]
    tokens, lengths = np.full((1, PROMPT), 7, np.int32), np.full(1, PROMPT, np.int32)
    return [tokens, lengths, *map(np.asarray, jax.tree.leaves(cache))]


def write_growing(path: str, kind: str) -> list[Any]:
    """Writes a file whose cache grows as torch's does; gives what it is called with."""
    lm, store = model().listed(), ("batch", PAIRS, "past", SIZE)
    cache = [[pax.export.spec(store) for _ in range(LAYERS)] for _ in range(2)]
    tokens = pax.export.spec(("batch", "length"), "int32")
    pax.export.to_onnx(
        lm, path, {"serving_default": (tokens, *cache)}, methods={"serving_default": _read_last},
        validate=False, card=False,
    )  # fmt: skip
    count, before = (PROMPT, 0) if kind == "prefill" else (1, ROOM - 1)
    empty = np.zeros((1, PAIRS, before, SIZE), np.float32)
    return [np.full((1, count), 7, np.int32), *[empty] * (2 * LAYERS)]


def _read_last(lm: Any, tokens: Any, keys: Any, values: Any) -> Any:
    """The logits of the last token, and the cache with the new ones behind."""
    before, (batch, count) = keys[0].shape[2], tokens.shape
    held = jnp.broadcast_to(jnp.arange(before + count), (batch, before + count))

    def reading(config: Any) -> Any:
        append = lambda store, new: jnp.concatenate([store, new], 2)  # noqa: E731
        return pax.nets.PlacedReading(config, held[:, before:], held, append)

    return pax.nets.read_placed(lm, tokens, (keys, values), reading, last=True)


class _Layer(tn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = tn.RMSNorm(DIM, 1e-5), tn.RMSNorm(DIM, 1e-5)
        self.query = tn.Linear(DIM, HEADS * SIZE, bias=False)
        self.key, self.value = (tn.Linear(DIM, PAIRS * SIZE, bias=False) for _ in range(2))
        self.out = tn.Linear(HEADS * SIZE, DIM, bias=False)
        self.gate, self.up = (tn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = tn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Any, turns: Any, mask: Any, key: Any, value: Any) -> Any:
        h = _scaled(x, self.one)
        heads = [
            each(h).view(1, x.shape[1], -1, SIZE).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        q, k = (_turned(each, *turns) for each in heads[:2])
        key, value = torch.cat([key, k], 2), torch.cat([value, heads[2]], 2)
        k, v = (each.repeat_interleave(HEADS // PAIRS, 1) for each in (key, value))
        scores = q @ k.transpose(-1, -2) * SIZE**-0.5 + mask
        h = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, x.shape[1], -1)
        x = x + self.out(h)
        h = _scaled(x, self.two)
        return x + self.down(tn.functional.silu(self.gate(h)) * self.up(h)), key, value


def _scaled(x: Any, norm: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * norm.weight


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * cos + half * sin


class _Net(tn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = tn.Embedding(VOCAB, DIM)
        self.layers = tn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = tn.RMSNorm(DIM, 1e-5)

    def forward(self, tokens: Any, *cache: Any) -> Any:
        before, count = cache[0].shape[2], tokens.shape[1]
        places = torch.arange(before, before + count)
        powers = 1e5 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
        angles = (places[:, None].float() * powers).repeat(1, 2)
        turns = angles.cos(), angles.sin()
        seen = places[:, None] >= torch.arange(before + count)
        mask = torch.where(seen, 0.0, -1e30)
        x, found = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            x, *new = layer(x, turns, mask, *cache[2 * number : 2 * number + 2])
            found += new
        x = _scaled(x[:, -1], self.norm)
        return (x @ self.embed.weight.T, *found)


def write_torch(path: str, kind: str) -> list[np.ndarray]:
    """Writes torch's file of a kind; gives what it is called with."""
    count, before = (PROMPT, 0) if kind == "prefill" else (1, ROOM - 1)
    tokens = torch.full((1, count), 7)
    cache = [torch.zeros(1, PAIRS, max(before, 1), SIZE) for _ in range(2 * LAYERS)]
    names = [f"past{i}" for i in range(2 * LAYERS)]
    axes = {name: {2: "before"} for name in names} | {"tokens": {1: "length"}}
    with torch.no_grad():
        torch.onnx.export(
            _Net().eval(), (tokens, *cache), path, dynamo=False, opset_version=17,
            input_names=["tokens", *names], dynamic_axes=axes,
        )  # fmt: skip
    empty = np.zeros((1, PAIRS, before, SIZE), np.float32)
    return [tokens.numpy(), *[empty] * (2 * LAYERS)]
