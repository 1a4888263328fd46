"""Tiny GGUF files, laid out as llama.cpp's converter lays out those of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from pax_export.nets import DecoderConfig

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
#: With neighboring rotary pairs.
_PAIRED = ("llama", "smollm3", "granite")
_NORMS_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], **others: np.ndarray
) -> Path:
    """A GGUF file of weights by the names of transformers; `others` are tensors besides."""
    import gguf

    family = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, family)
    for key, value in _metadata(config).items():
        write = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        write(f"{family}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config["vocab_size"])])
    for name, array in tensors(config, weights).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for name, array in others.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the file by their names."""
    family = config["model_type"]
    names = _NAMES | (_NORMS_AFTER if family in ("gemma2", "gemma3_text", "olmo2") else {})
    found = {}
    for name, array in weights.items():
        stem, kind = name.rsplit(".", 1)
        start, number, rest = "", "", stem
        for prefix in ("model.layers.", "transformer.h."):
            if stem.startswith(prefix):
                number, rest = stem.removeprefix(prefix).split(".", 1)
                start = f"blk.{number}."
        if family in _PAIRED and rest in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in rest else "num_key_value_heads"]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if family.startswith("gemma") and "norm" in rest:
            array = array + 1
        if family == "gpt2" and rest.split(".")[-1].startswith("c_") and kind == "weight":
            array = array.T
        found[f"{start}{names[rest]}.{kind}"] = array
    return found


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    if config["model_type"] == "gpt2":
        return {
            "block_count": config["n_layer"], "context_length": config["n_positions"],
            "embedding_length": config["n_embd"], "feed_forward_length": 4 * config["n_embd"],
            "attention.head_count": config["n_head"], "attention.layer_norm_epsilon": 1e-5,
        }  # fmt: skip
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
    }
    own = {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_scale": "embedding_multiplier",
        "logit_scale": "logits_scaling",
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.layer_norm_epsilon": "norm_epsilon",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    }
    if "partial_rotary_factor" in config:
        found["rope.dimension_count"] = int(config["head_dim"] * config["partial_rotary_factor"])
    if config.get("rope_scaling", {}).get("type") == "longrope":
        old = config["original_max_position_embeddings"]
        ratio = math.log(config["max_position_embeddings"] / old) / math.log(old)
        found["rope.scaling.attn_factor"] = math.sqrt(1 + ratio)
    return found | {key: config[name] for key, name in own.items() if name in config}


METADATA = {
    "general.architecture": "llama", "general.name": "a", "tokenizer.ggml.tokens": ["a"] * 9,
    "llama.embedding_length": 8, "llama.block_count": 2, "llama.attention.head_count": 2,
    "llama.feed_forward_length": 8, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def of_gguf(**others: Any) -> DecoderConfig:
    """The configuration of a small Llama with these values; `__` stands for a dot."""
    values = {f"llama.{name.replace('__', '.')}": value for name, value in others.items()}
    return DecoderConfig.from_gguf(METADATA | values)
