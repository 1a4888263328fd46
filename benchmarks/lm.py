"""A language model of SmolLM2's sizes: a token after the other, and a prompt at once.

What each candidate computes is the same: the body, logits of the last token, the next token, and
a cache that is written in place.  Reading the weights once is the least that a token costs; how
long that takes, a copy of half as many bytes says, which moves as many.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from benchmarks.compare import compare, table
from benchmarks.lm_peers import (
    CONFIG,
    ROOM,
    llama_reader,
    llama_step,
    nnx_of,
    onnx_step,
    params_of,
    raw_cache,
    raw_of,
)
from pax_export._foundations.optional import is_installed

PROMPT = 512
_ROUNDS = 7
_LISTED = "pax_export, layers in a list"


def tables() -> Iterator[str]:
    """Decoding at two sizes of a batch, and reading a prompt; float32 and bfloat16 weights."""
    yield from _costs()
    for dtype in (jnp.float32, jnp.bfloat16):
        lm = pax.nets.Decoder(CONFIG, layers="listed", dtype=dtype)
        name = jnp.dtype(dtype).name
        for batch in (1, 8):
            count = _bytes(lm) + _cache_bytes(lm, batch)
            rows = compare(
                _decoders(lm, batch) | {"copy": _moving(count)}, rounds=_ROUNDS, least=0.2
            )
            rows, copied = rows[:-1], rows[-1].seconds
            text = table(f"SmolLM2-135M, {name}, a token for each of {batch} rows", rows, "1.03")
            share = copied / next(row for row in rows if row.name == _LISTED).seconds
            yield text + (
                f"Weights and cache are {count / 1e6:.0f} MB; at the speed of a copy they pass in "
                f"{copied * 1e3:.1f} ms, which is {share:.0%} of the time of {_LISTED}.\n"
            )
        rows = compare(_readers(lm), rounds=5, least=0.0)
        yield table(f"SmolLM2-135M, {name}, a prompt of {PROMPT} tokens", rows, "1.03")


def _decoders(lm: Any, batch: int) -> dict[str, Callable[[], Any]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 49152, (batch, 1)), jnp.int32)
    of_nnx, state = nnx_of(lm)
    made = {
        "raw jax over dicts": _loop(raw_of(lm), params_of(lm), tokens, raw_cache(lm, batch)),
        _LISTED: _loop(_pax, lm, tokens, lm.init_cache(batch, ROOM)),
        "pax_export, layers scanned": _loop(_pax, lm.scanned(), tokens, lm.init_cache(batch, ROOM)),
        "pax_export, generate.stream": _streamed(lm, tokens),
        "flax nnx": _loop(of_nnx, state, tokens, raw_cache(lm, batch)),
    }
    runs_onnx = is_installed("onnx") and is_installed("onnxruntime")
    if lm.embed.weight.dtype == jnp.float32 and runs_onnx:
        made["onnxruntime, our export"] = onnx_step(lm, tokens)
    if _has_llama():
        made["llama.cpp"] = llama_step(lm, tokens)
    return made


def _readers(lm: Any) -> dict[str, Callable[[], Any]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 49152, (1, PROMPT)), jnp.int32)
    of_nnx, state = nnx_of(lm)

    def of(read: Any, net: Any, cache: Any) -> Callable[[], Any]:
        jitted = jax.jit(read)
        return lambda: jitted(net, tokens, cache)[0].block_until_ready()

    made = {
        "raw jax over dicts": of(raw_of(lm), params_of(lm), raw_cache(lm, 1)),
        _LISTED: of(_pax, lm, lm.init_cache(1, ROOM)),
        "pax_export, layers scanned": of(_pax, lm.scanned(), lm.init_cache(1, ROOM)),
        "flax nnx": of(of_nnx, state, raw_cache(lm, 1)),
    }
    if _has_llama():
        made["llama.cpp"] = llama_reader(lm, tokens)
    return made


def _has_llama() -> bool:
    """It is in no extra, since it is compiled where it is installed."""
    return is_installed("llama_cpp") and is_installed("gguf")


def _loop(step: Callable[..., Any], net: Any, tokens: Any, cache: Any) -> Callable[[], Any]:
    """Adds a token in each call; begins again where the cache is full."""
    jitted = jax.jit(step, donate_argnums=2)
    state, begun = list(jitted(net, tokens, cache)), int(tokens.shape[1])
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
        return pax.generate.stream(lm, tokens, max_new_tokens=ROOM - 1, max_length=ROOM)

    held = [begin()]
    next(held[0])

    def once() -> Any:
        try:
            return next(held[0])
        except StopIteration:
            held[0] = begin()
            return next(held[0])

    return once


# --- bytes ---------------------------------------------------------------------------------


def _bytes(lm: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lm))


def _cache_bytes(lm: Any, batch: int) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lm.init_cache(batch, ROOM)))


def _moving(count: int) -> Callable[[], Any]:
    """Copies half as many bytes, on all cores: reads and writes together are as many."""
    cores = os.cpu_count() or 1
    size = count // 8 // cores
    pairs = [(np.ones(size, np.float32), np.empty(size, np.float32)) for _ in range(cores)]
    threads = ThreadPoolExecutor(cores)
    return lambda: list(threads.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))


# --- before the first token, and memory ----------------------------------------------------


def _costs() -> Iterator[str]:
    """Tracing, exporting, and what decoding holds beside weights and cache."""
    traces = {layers: [] for layers in (1, CONFIG.num_layers)}
    for _ in range(_ROUNDS):
        for layers, times in traces.items():
            times.append(_traced(layers))
    one, all_ = (statistics.median(times) for times in traces.values())
    lm = pax.nets.Decoder(CONFIG)
    importlib.import_module("tensorflow")  # not in the time of the export
    with tempfile.TemporaryDirectory() as folder:
        busy = time.process_time()
        export = _seconds(
            lambda: pax.generation.export(lm, folder + "/lm", max_length=ROOM, validate=False)
        )
        busy = time.process_time() - busy
    lines = [
        "### SmolLM2-135M: before the first token, and memory",
        "",
        f"- Tracing a step of {CONFIG.num_layers} scanned layers takes {all_ / one:.2f} × the time "
        f"of 1 layer: {all_ * 1e3:.0f} ms. Goal: 1.5.",
        f"- Its export as a SavedModel, not validated, takes {export:.1f} s, {busy:.1f} s of the "
        "processor. Goal: 5 s.",
    ]
    for form in ("scanned", "listed"):
        run = [sys.executable, "-c", _PEAK, form]
        done = subprocess.run(run, check=True, capture_output=True, text=True)
        lines.append(f"- Decoding, layers {form}: {done.stdout.strip()}")
    yield "\n".join([*lines, ""])


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _traced(layers: int) -> float:
    config = dataclasses.replace(CONFIG, num_layers=layers)
    lm = jax.eval_shape(lambda: pax.nets.Decoder(config))
    cache = jax.eval_shape(lambda: pax.nets.Decoder(config).init_cache(1, ROOM))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    jax.clear_caches()
    return _seconds(lambda: jax.jit(_pax).trace(lm, token, cache))


# In a process of its own, whose peak begins anew when weights and cache lie there and the
# program is compiled.
_PEAK = """
import sys
import jax, jax.numpy as jnp, numpy as np
import pax_export as pax
from benchmarks.lm import _bytes, _cache_bytes, _pax
from benchmarks.lm_peers import CONFIG, ROOM

def kilobytes(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

def settled():
    open("/proc/self/clear_refs", "w").write("5")
    return kilobytes("VmRSS")

shapes = jax.eval_shape(lambda: pax.nets.Decoder(CONFIG, layers=sys.argv[1]))
step = jax.jit(_pax, donate_argnums=2)
ones = jax.eval_shape(lambda: jnp.zeros((1, 1), jnp.int32))
cache = jax.eval_shape(lambda lm: lm.init_cache(1, ROOM), shapes)
step = step.lower(shapes, ones, cache).compile()
before = settled()
random = np.random.default_rng(0)
lm = jax.tree.map(lambda x: jnp.asarray(random.random(x.shape, np.float32)), shapes)
cache = lm.init_cache(1, ROOM)
held = (_bytes(lm) + _cache_bytes(lm, 1)) / 1e6
token = jnp.ones((1, 1), jnp.int32)
loaded = settled()
for _ in range(5):
    found, cache = step(lm, token, cache)
    token = found[:, None]
token.block_until_ready()
more = (kilobytes("VmHWM") - loaded) * 1024 / 1e6
print(f"weights and cache are {held:.0f} MB, the process grew by "
      f"{(loaded - before) * 1024 / 1e6:.0f} MB with them, and by {more:.0f} MB at most in steps.")
"""
