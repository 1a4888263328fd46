"""A language model of SmolLM2's sizes: a token after the other, and a prompt at once.

What each candidate computes is the same: the body, logits of the last token, the next token, and
a cache that is written in place.  Reading the weights once is the least that a token costs; how
long that takes, a copy of half as many bytes says, which moves as many.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pax_export as pax
from benchmarks.compare import compare, table
from pax_export._optional import is_installed

CONFIG = pax.nets.DecoderConfig.llama(
    vocab_size=49152, dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536,
    tied=True, rotary_base=100000.0,
)  # fmt: skip
ROOM, PROMPT = 1024, 512
_ROUNDS = 7


def tables() -> Iterator[str]:
    """Decoding at two sizes of a batch, and reading a prompt; float32 and bfloat16 weights."""
    for dtype in (jnp.float32, jnp.bfloat16):
        lm = pax.nets.Decoder(CONFIG, layers="listed", dtype=dtype)
        name = jnp.dtype(dtype).name
        for batch in (1, 8):
            rows = compare(_decoders(lm, batch), rounds=_ROUNDS, least=0.2)
            least = _moving(_bytes(lm) + _cache_bytes(lm, batch))
            (moved,) = compare({"bytes": least}, rounds=_ROUNDS, least=0.1)
            text = table(f"SmolLM2-135M, {name}, a token for each of {batch} rows", rows, "1.03")
            share = moved.least / next(row for row in rows if row.name == _LISTED).least
            yield text + (
                f"Weights and cache are {(_bytes(lm) + _cache_bytes(lm, batch)) / 1e6:.0f} MB; at "
                f"the speed of a copy they pass in {moved.least * 1e3:.1f} ms, which is "
                f"{share:.0%} of the time of {_LISTED}.\n"
            )
        rows = compare(_readers(lm), rounds=3, least=0.0)
        yield table(f"SmolLM2-135M, {name}, a prompt of {PROMPT} tokens", rows, "1.03")


_LISTED = "pax_export, layers in a list"


def _decoders(lm: Any, batch: int) -> dict[str, Callable[[], Any]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 49152, (batch, 16)), jnp.int32)
    made = {
        "raw jax over dicts": _loop(_raw(lm), _params(lm), tokens, _raw_cache(lm, batch)),
        _LISTED: _loop(_pax, lm, tokens, lm.init_cache(batch, ROOM)),
        "pax_export, layers scanned": _loop(_pax, lm.scanned(), tokens, lm.init_cache(batch, ROOM)),
        "pax_export, generate.stream": _streamed(lm, tokens),
        "flax nnx": _nnx_loop(lm, tokens, _raw_cache(lm, batch)),
    }
    runs_onnx = is_installed("onnx") and is_installed("onnxruntime")
    if lm.embed.weight.dtype == jnp.float32 and runs_onnx:
        made |= _onnx(lm, tokens)
    return made


def _readers(lm: Any) -> dict[str, Callable[[], Any]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 49152, (1, PROMPT)), jnp.int32)
    raw, params, empty = jax.jit(_raw(lm)), _params(lm), _raw_cache(lm, 1)
    read, cache = jax.jit(_pax), lm.init_cache(1, ROOM)
    scanned = lm.scanned()
    return {
        "raw jax over dicts": lambda: raw(params, tokens, empty)[0].block_until_ready(),
        _LISTED: lambda: read(lm, tokens, cache)[0].block_until_ready(),
        "pax_export, layers scanned": lambda: read(scanned, tokens, cache)[0].block_until_ready(),
    }


def _loop(step: Callable[..., Any], net: Any, tokens: Any, cache: Any) -> Callable[[], Any]:
    """Adds a token in each call; begins again where the cache is full."""
    jitted = jax.jit(step, donate_argnums=2)
    token, held = jax.jit(step)(net, tokens, cache)
    state, begun = [token, held], int(tokens.shape[1])
    count = [begun]

    def once() -> Any:
        if count[0] == ROOM:  # the lengths go back; what is behind them is written over
            state[1], count[0] = _cut(state[1], begun), begun
        state[0], state[1] = jitted(net, state[0][:, None], state[1])
        count[0] += 1
        return state[0].block_until_ready()

    return once


def _cut(cache: Any, length: int) -> Any:
    if isinstance(cache, dict):
        return {**cache, "lengths": jnp.full_like(cache["lengths"], length)}
    return cache.with_lengths(jnp.full_like(cache.lengths, length))


def _pax(lm: Any, tokens: Any, cache: Any) -> tuple[jax.Array, Any]:
    logits, cache = lm(tokens, cache=cache, last_only=True)
    return jnp.argmax(logits, -1).astype(jnp.int32), cache


def _streamed(lm: Any, tokens: Any) -> Callable[[], Any]:
    def begin() -> Any:
        return pax.generate.stream(lm, tokens, max_new_tokens=ROOM - 16, max_length=ROOM)

    held = [begin()]
    next(held[0])

    def once() -> Any:
        try:
            return next(held[0])
        except StopIteration:
            held[0] = begin()
            return next(held[0])

    return once


# --- the same arithmetic over dicts ------------------------------------------------------


def _params(lm: Any) -> dict[str, Any]:
    def of(layer: Any) -> dict[str, Any]:
        attention, dense = layer.attention, layer.dense
        return {
            "before": layer.attention_norm.scale, "query": attention.query.weight,
            "key": attention.key.weight, "value": attention.value.weight,
            "output": attention.output.weight, "between": layer.dense_norm.scale,
            "gate": dense.gate.weight, "up": dense.up.weight, "down": dense.down.weight,
        }  # fmt: skip

    layers = [of(layer) for layer in lm.listed().layers]
    return {"embed": lm.embed.weight, "layers": layers, "norm": lm.norm.scale}


def _raw_cache(lm: Any, batch: int) -> dict[str, Any]:
    cache = lm.init_cache(batch, ROOM)
    return {"keys": cache.keys, "values": cache.values, "lengths": cache.lengths}


def _normed(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + CONFIG.norm_eps)
    return wide.astype(x.dtype) * scale


def _angles(places: Any) -> tuple[Any, Any]:
    half = jnp.arange(0, CONFIG.head_size, 2, dtype=jnp.float32) / CONFIG.head_size
    angles = places[..., None].astype(jnp.float32) / CONFIG.rotary_base**half
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def _turned(x: Any, angles: tuple[Any, Any]) -> Any:
    cos, sin = angles
    one, other = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate((one * cos - other * sin, other * cos + one * sin), -1)
    return turned.astype(x.dtype)


def _raw(lm: Any) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
    """A function of params, tokens and a cache; `products` says how a layer is multiplied."""
    return partial(_forward, products=lambda layer, name, x: x @ layer[name])


def _forward(
    params: Any, tokens: Any, cache: Any, products: Callable[[Any, str, Any], Any]
) -> tuple[jax.Array, Any]:
    batch, length = tokens.shape
    keys, values, lengths = cache["keys"], cache["values"], cache["lengths"]
    places = lengths[:, None] + jnp.arange(length, dtype=jnp.int32)
    angles, rows = _angles(places), jnp.arange(batch)[:, None]
    seen = jnp.arange(keys.shape[2]) <= places[:, :, None]
    h = params["embed"][tokens]
    for index, layer in enumerate(params["layers"]):
        x = _normed(h, layer["before"])
        split = [products(layer, name, x) for name in ("query", "key", "value")]
        query, key, value = (y.reshape(batch, length, -1, CONFIG.head_size) for y in split)
        query, key = _turned(query, angles), _turned(key, angles)
        keys = keys.at[index, rows, places].set(key, mode="drop", unique_indices=True)
        values = values.at[index, rows, places].set(value, mode="drop", unique_indices=True)
        heads = jax.nn.dot_product_attention(query, keys[index], values[index], mask=seen[:, None])
        h = h + products(layer, "output", heads.reshape(batch, length, -1))
        x = _normed(h, layer["between"])
        inner = jax.nn.silu(products(layer, "gate", x)) * products(layer, "up", x)
        h = h + products(layer, "down", inner)
    h = _normed(h[:, -1], params["norm"])
    logits = jnp.einsum("bd,vd->bv", h, params["embed"], preferred_element_type=jnp.float32)
    after = {"keys": keys, "values": values, "lengths": lengths + length}
    return jnp.argmax(logits, -1).astype(jnp.int32), after


# --- the same by flax nnx ------------------------------------------------------------------


class _Net(nnx.Module):
    def __init__(self, params: Any):
        self.embed, self.norm = nnx.Param(params["embed"]), nnx.Param(params["norm"])
        self.layers = nnx.List([_Layer(each) for each in params["layers"]])

    def __call__(self, tokens: Any, cache: Any) -> tuple[jax.Array, Any]:
        params = {"embed": self.embed[...], "norm": self.norm[...], "layers": self.layers}
        return _forward(params, tokens, cache, lambda layer, name, x: getattr(layer, name)(x))


class _Layer(nnx.Module):
    def __init__(self, params: dict[str, Any]):
        for name, value in params.items():
            if value.ndim == 1:
                setattr(self, name, nnx.Param(value))
                continue
            made = nnx.Linear(
                *value.shape, use_bias=False, dtype=value.dtype, param_dtype=value.dtype,
                rngs=nnx.Rngs(0),
            )  # fmt: skip
            made.kernel[...] = value
            setattr(self, name, made)

    def __getitem__(self, name: str) -> Any:  # as the dicts have it
        return getattr(self, name)[...]


def _nnx_loop(lm: Any, tokens: Any, cache: Any) -> Callable[[], Any]:
    graph, state = nnx.split(_Net(_params(lm)))
    return _loop(lambda state, *rest: nnx.merge(graph, state)(*rest), state, tokens, cache)


# --- our own export ------------------------------------------------------------------------


def _onnx(lm: Any, tokens: Any) -> dict[str, Callable[[], Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/lm.onnx"
        pax.generation.export(lm, path, format="onnx", max_length=ROOM, validate=False)
        served = pax.export.load(path)
    call, batch = served.runtime.run, tokens.shape[0]
    info = served.report.signatures["prefill"]
    names = [entry.name for entry in info.outputs]
    inputs = {
        entry.name: np.zeros([batch if n == "batch" else n for n in entry.shape], entry.dtype)
        for entry in info.inputs
        if entry.name.startswith("cache.")
    }

    def step(tokens: Any) -> Any:
        lengths = np.full(batch, tokens.shape[1], np.int32)
        found = dict(zip(names, call(names, {"tokens": tokens, "lengths": lengths, **inputs})))
        if int(found["cache.lengths_output"].max()) < ROOM:
            inputs.update((name, found[f"{name}_output"]) for name in inputs)
        return found["logits"].argmax(-1).astype(np.int32)

    held = [step(np.asarray(tokens))]

    def once() -> Any:
        held[0] = step(held[0][:, None])
        return held[0]

    return {"onnxruntime, our export": once}


# --- bytes ---------------------------------------------------------------------------------


def _bytes(lm: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lm))


def _cache_bytes(lm: Any, batch: int) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lm.init_cache(batch, ROOM)))


def _moving(count: int) -> Callable[[], Any]:
    """Copies half as many bytes: reads and writes together are as many."""
    source, target = np.ones(count // 8, np.float32), np.empty(count // 8, np.float32)
    return lambda: np.copyto(target, source)
