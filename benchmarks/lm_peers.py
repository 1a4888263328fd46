"""The language model of `benchmarks.lm` by others: raw jax, flax nnx, onnxruntime, llama.cpp.

Each computes the same as `pax.nets.Decoder` with the same weights and the same cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pax_export as pax

CONFIG = pax.nets.DecoderConfig.llama(
    vocab_size=49152, dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536,
    tied=True, rotary_base=100000.0,
)  # fmt: skip
ROOM = 1024

# --- the same arithmetic over dicts ------------------------------------------------------


def params_of(lm: Any) -> dict[str, Any]:
    """The weights of a net as dicts."""

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


def raw_cache(lm: Any, batch: int) -> dict[str, Any]:
    """An empty cache as a dict."""
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


def raw_of(lm: Any) -> Callable[[Any, Any, Any], tuple[jax.Array, Any]]:
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


def nnx_of(lm: Any) -> tuple[Callable[[Any, Any, Any], tuple[jax.Array, Any]], Any]:
    """A function of a state, tokens and a cache, and the state."""
    graph, state = nnx.split(_Net(params_of(lm)))
    return lambda state, *rest: nnx.merge(graph, state)(*rest), state


# --- our own export ------------------------------------------------------------------------


def onnx_step(lm: Any, tokens: Any) -> Callable[[], Any]:
    """A function that adds a token in each call."""
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

    return once


# --- llama.cpp -----------------------------------------------------------------------------


def write_gguf(lm: Any, path: str) -> str:
    """The net as a file of llama.cpp, in the dtype that it has and without words."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_context_length(ROOM)
    writer.add_embedding_length(CONFIG.dim)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_feed_forward_length(CONFIG.hidden_dim)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_dimension_count(CONFIG.head_size)
    writer.add_rope_freq_base(CONFIG.rotary_base)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    kinds = gguf.GGMLQuantizationType
    kind = kinds.F32 if lm.embed.weight.dtype == jnp.float32 else kinds.BF16
    for name, array in _tensors(params_of(lm)):
        array = np.ascontiguousarray(np.asarray(array, np.float32))
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF = {
    "before": "attn_norm", "query": "attn_q", "key": "attn_k", "value": "attn_v",
    "output": "attn_output", "between": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip


def _tensors(params: dict[str, Any]) -> Any:
    yield "token_embd.weight", params["embed"]
    yield "output_norm.weight", params["norm"]
    for number, layer in enumerate(params["layers"]):
        for name, array in layer.items():
            if name in ("query", "key"):  # llama.cpp turns neighbours
                halves = array.reshape(CONFIG.dim, -1, 2, CONFIG.head_size // 2)
                array = halves.swapaxes(2, 3).reshape(array.shape)
            yield f"blk.{number}.{_GGUF[name]}.weight", array.T


class Llama:
    """A file of llama.cpp through ctypes: reads tokens of several rows, gives the likeliest next.

    ``llama_cpp`` comes with llama-cpp-python, or its folder and ``LLAMA_CPP_LIB_PATH`` say where
    a library lies that was built by hand.
    """

    def __init__(self, path: str, batch: int, cache: str = "float32"):
        import gguf
        import llama_cpp

        self._c, self.batch, self.held = llama_cpp, batch, 0
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = ROOM * batch, batch
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = os.cpu_count()
        kinds = gguf.GGMLQuantizationType
        options.type_k = options.type_v = int(kinds.F32 if cache == "float32" else kinds.BF16)
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not open {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)

    def cut(self, length: int) -> None:
        """Forgets what stands behind a length."""
        for row in range(self.batch):
            self._c.llama_memory_seq_rm(self._memory, row, length, -1)
        self.held = length

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """The likeliest token behind each row of ``[batch, length]``."""
        rows, length = tokens.shape
        given = self._c.llama_batch_init(rows * length, 0, 1)
        given.n_tokens = rows * length
        for at in range(rows * length):
            row, place = divmod(at, length)
            given.token[at], given.pos[at] = int(tokens[row, place]), self.held + place
            given.n_seq_id[at], given.seq_id[at][0] = 1, row
            given.logits[at] = place == length - 1
        failed = self._c.llama_decode(self._context, given)
        self._c.llama_batch_free(given)
        if failed:
            raise RuntimeError(f"llama_decode gave {failed}")
        self.held += length
        last = [(row + 1) * length - 1 for row in range(rows)]
        size = (CONFIG.vocab_size,)
        found = [self._c.llama_get_logits_ith(self._context, at) for at in last]
        return np.array([np.ctypeslib.as_array(each, size).argmax() for each in found])


def llama_step(lm: Any, tokens: Any) -> Callable[[], Any]:
    """A function that adds a token in each call."""
    made, begun = _llama_of(lm, tokens.shape[0]), tokens.shape[1]
    held = [made.read(np.asarray(tokens))]

    def once() -> Any:
        if made.held == ROOM:
            made.cut(begun)
        held[0] = made.read(held[0][:, None])
        return held[0]

    return once


def llama_reader(lm: Any, tokens: Any) -> Callable[[], Any]:
    """A function that reads a prompt into an empty cache."""
    made, tokens = _llama_of(lm, 1), np.asarray(tokens)

    def once() -> Any:
        made.cut(0)
        return made.read(tokens)

    return once


def _llama_of(lm: Any, batch: int) -> Llama:
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(lm, folder + "/lm.gguf")
        return Llama(path, batch, str(lm.embed.weight.dtype))
