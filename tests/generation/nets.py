"""A small language model that is none of the library's nets: what generation may ask of a net."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import pax_export as pax

VOCABULARY = 23


@partial(
    jax.tree_util.register_dataclass, data_fields=["keys", "values", "lengths"], meta_fields=[]
)
@dataclass(frozen=True)
class TinyCache:
    """What `TinyLM` has read: ``[batch, places, dim]``, and a length for each row."""

    keys: Any
    values: Any
    lengths: Any

    @property
    def max_length(self):
        return self.keys.shape[1]

    def with_lengths(self, lengths):
        return TinyCache(self.keys, self.values, jnp.asarray(lengths, jnp.int32))


class TinyLM(pax.ParameterModule):
    """One head of attention over embeddings that know their places, and a dense layer."""

    def __init__(self, dim=16, seed=0, dropout_rate=0.5):
        super().__init__()
        keys = iter(jax.random.split(jax.random.key(seed), 8))

        def normal(*shape):
            return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

        self.embed = 4 * normal(VOCABULARY, dim)
        self.query, self.key, self.value = (normal(dim, dim) for _ in range(3))
        self.dense, self.head = normal(dim, dim), 4 * normal(dim, VOCABULARY)
        self.dropout = pax.Dropout(dropout_rate)  # which makes nonsense in train mode

    def init_cache(self, batch, max_length, dtype=None):
        shape = (batch, max_length, self.embed.shape[1])
        zeros = jnp.zeros(shape, self.embed.dtype if dtype is None else dtype)
        return TinyCache(zeros, zeros, jnp.zeros((batch,), jnp.int32))

    def __call__(self, tokens, cache=None, lengths=None):
        tokens = jnp.asarray(tokens)
        batch, length = tokens.shape
        new = length if lengths is None else lengths
        have = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths
        steps = jax.lax.broadcasted_iota(jnp.int32, (batch, length), 1)
        places = have[:, None] + steps
        h = self.embed[tokens] + jnp.sin(
            places[..., None] / (1.0 + jnp.arange(self.embed.shape[1]))
        )
        h = self.dropout(h)
        keys, values = h @ self.key, h @ self.value
        if cache is not None:
            rows = jax.lax.broadcasted_iota(jnp.int32, (batch, length), 0)
            # What is not meant goes nowhere.
            to = jnp.where(steps < jnp.reshape(new, (-1, 1)), places, cache.keys.shape[1])
            put = lambda old, more: old.at[rows, to].set(more.astype(old.dtype), mode="drop")  # noqa: E731
            keys, values = put(cache.keys, keys), put(cache.values, values)
            cache = TinyCache(keys, values, have + new)
        at = jax.lax.broadcasted_iota(jnp.int32, (1, 1, keys.shape[1]), 2)
        scores = jnp.einsum("bqd,bkd->bqk", h @ self.query, keys.astype(h.dtype))
        weights = jax.nn.softmax(jnp.where(at <= places[..., None], scores, -1e30), -1)
        h = h + jnp.einsum("bqk,bkd->bqd", weights, values.astype(h.dtype))
        logits = (h + jnp.tanh(h @ self.dense)) @ self.head
        return logits if cache is None else (logits, cache)


def prompts(*lengths, seed=0):
    """Rows of random tokens, of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, size).tolist() for size in lengths]


#: A call without a cache, compiled once for each shape of the tokens.
forward = jax.jit(lambda lm, tokens: lm(tokens))


def logits_of(lm, text):
    """The logits after each token of a text, ``[length, vocabulary]``, without a cache."""
    filled = text + [0] * (-len(text) % 32)  # few shapes; what stands behind changes nothing
    return np.asarray(forward(lm.eval(), jnp.array([filled])))[0, : len(text)]


def alone(lm, prompt, count, stop=(), pad=0):
    """The greedy tokens after one prompt, each from a call that has no cache."""
    text, made = list(prompt), []
    while len(made) < count:
        made.append(int(logits_of(lm, text)[-1].argmax()))
        text.append(made[-1])
        if made[-1] in stop:
            break
    return made + [pad] * (count - len(made))


def write_llama(folder, dim=16, layers=2, hidden=24, scale=0.15):
    """A folder of transformers with a Llama whose weights numpy draws, the same everywhere."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": dim, "intermediate_size": hidden,
             "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": dim // 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
             "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes})
    )
    of_layer = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (dim // 2, dim),
        "self_attn.v_proj": (dim // 2, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (hidden, dim),
        "mlp.up_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    shapes = {"model.embed_tokens": (VOCABULARY, dim), "lm_head": (VOCABULARY, dim)}
    shapes |= {"model.norm": (dim,)}
    shapes |= {f"model.layers.{i}.{k}": v for i in range(layers) for k, v in of_layer.items()}
    random = np.random.default_rng(0)
    weights = {
        f"{name}.weight": (random.normal(size=shape) * scale + (len(shape) == 1)).astype("float32")
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
