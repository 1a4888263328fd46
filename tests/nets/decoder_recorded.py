"""Configurations, and the first logits that transformers 5.23 gives after the tokens.

The weights are those of `decoder_reference.random_weights`; `tests/oracles` compares the numbers
with transformers again.
"""

from __future__ import annotations

from typing import Any

from tests.nets.decoder_reference import LLAMA

TOKENS = [[3, 1, 4, 15, 9, 26, 5, 30, 8, 17, 2, 7]]
_WIDE = {**LLAMA, "head_dim": 8}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_GEMMA = {**LLAMA, "tie_word_embeddings": True, "sliding_window": 3}
del _GEMMA["hidden_act"]

CONFIGS: dict[str, dict[str, Any]] = {
    "yarn with mscale": {
        **_WIDE, "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "yarn that is not truncated": {
        **_WIDE, "rope_parameters": {**_YARN, "truncate": False, "beta_fast": 2, "rope_theta": 50},
    },
    "yarn with the ratio of lengths": {
        **_WIDE, "model_type": "mistral", "original_max_position_embeddings": 8,
        "sliding_window": None,
        "rope_scaling": {"type": "yarn", "factor": None},
    },
    "llama3 without an original length": {
        **_WIDE, "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2, "high_freq_factor": 9,
        },
    },
    "gemma with silu": {
        **LLAMA, "model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "silu",
    },
    "gemma with gelu that is approximated": {
        **LLAMA, "model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu",
    },
    "gemma2 without its own keys": {**_GEMMA, "model_type": "gemma2"},
    "gemma2 without soft caps": {
        **_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "query_pre_attn_scalar": 9,
    },
    "gemma3 with its scaled rope in both": {
        **_GEMMA, "model_type": "gemma3_text", "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 40.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 30.0},
        },
    },
    "qwen3 with windows from its second layer on": {
        **_WIDE, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 3,
        "max_window_layers": 1, "tie_word_embeddings": True,
    },
    "olmo3": {
        **_WIDE, "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 3,
        "rope_scaling": _YARN,
    },
    "exaone4": {**_WIDE, "model_type": "exaone4", "sliding_window": 3, "sliding_window_pattern": 2},
    "ministral": {
        **_WIDE, "model_type": "ministral", "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed_oss": {
        **_WIDE, "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": True,
    },
    "ernie4_5": {**_WIDE, "model_type": "ernie4_5", "use_bias": True},
    "helium": {**_WIDE, "model_type": "helium", "head_dim": 2},
}  # fmt: skip
LOGITS: dict[str, list[float]] = {
    "yarn with mscale": [1.53468, -0.41637, 1.50136, -1.65646, -0.42733],
    "yarn that is not truncated": [2.09379, -0.29002, 1.3329, -1.54536, -0.70751],
    "yarn with the ratio of lengths": [1.99269, -0.46191, 1.31298, -1.5293, -0.68141],
    "llama3 without an original length": [1.74989, -0.33045, 1.48817, -1.72199, -0.53082],
    "gemma with silu": [0.8294, -3.09798, 2.44237, 8.06747, -2.89845],
    "gemma with gelu that is approximated": [0.3096, -3.08788, 2.04087, 9.07563, -2.55639],
    "gemma2 without its own keys": [4.9468, -4.9199, 1.52, 4.57767, -4.34676],
    "gemma2 without soft caps": [5.93788, -4.40471, 2.74589, 3.47274, -4.11176],
    "gemma3 with its scaled rope in both": [2.49107, -7.04851, 0.6544, 5.87505, -2.43482],
    "qwen3 with windows from its second layer on": [2.95161, 0.22367, 0.13199, 3.65866, -2.1008],
    "olmo3": [0.57239, 1.11424, 1.69046, -1.49137, 1.29218],
    "exaone4": [2.51532, 0.41062, 0.43406, -2.88524, 0.65877],
    "ministral": [1.93711, -0.13807, 1.28976, -1.95037, -0.86993],
    "seed_oss": [-0.51338, 0.81392, 1.12494, -1.69048, 0.44055],
    "ernie4_5": [-0.48005, 1.35087, 0.75287, 1.2924, -0.07421],
    "helium": [-0.64451, 0.02118, 0.09393, 0.25493, -0.22774],
}
