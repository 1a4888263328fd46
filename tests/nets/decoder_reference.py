"""Language models in numpy, float64 and loops: what a `Decoder` must compute.

Written from the papers and from what the configurations of transformers mean; it shares nothing
with the library: no class, no table of names, no way to build a mask or to turn a pair.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

LLAMA = {
    "model_type": "llama", "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 20,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"type": "longrope", "short_factor": [1.1, 1.5], "long_factor": [2.0, 5.5]}
_GEMMA = {
    **LLAMA,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 9.0, "sliding_window": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rope_scaling": _LLAMA3},
    "smollm2": {**LLAMA, "tie_word_embeddings": True},
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 3},
    "qwen2": {**LLAMA, "model_type": "qwen2", "rope_scaling": _YARN, "num_key_value_heads": 1},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gemma": {**_GEMMA, "model_type": "gemma"},
    "gemma2": {
        **_GEMMA2, "model_type": "gemma2", "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "num_hidden_layers": 3,
    },
    "gemma3": {
        **_GEMMA2, "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 3,
        "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {
        **LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 3,
    },
    "phi4": {
        **LLAMA, "model_type": "phi3", "hidden_size": 24, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 8, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True, "max_position_embeddings": 256,
        "original_max_position_embeddings": 64, "rope_scaling": LONGROPE,
    },
    "smollm3": {
        **LLAMA, "model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True,
    },
    "granite": {
        **LLAMA, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 0.5,
        "attention_multiplier": 0.7, "residual_multiplier": 0.6, "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "starcoder2": {
        **LLAMA, "model_type": "starcoder2", "sliding_window": 3, "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "norm_type": "layer_norm",
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 31, "n_embd": 12, "n_layer": 2, "n_head": 3,
        "n_positions": 16, "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip
del CONFIGS["starcoder2"]["rms_norm_eps"]


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by the names and in the layout of transformers."""
    draws = np.random.RandomState(seed)

    def made(*shape: int) -> np.ndarray:
        return (draws.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    if config["model_type"] == "gpt2":
        return _weights_of_gpt2(config, made)
    family, dim = config["model_type"], config["hidden_size"]
    size = config["head_dim"]
    outs = {
        "self_attn.q_proj": (config["num_attention_heads"] * size, dim),
        "self_attn.k_proj": (config["num_key_value_heads"] * size, dim),
        "self_attn.v_proj": (config["num_key_value_heads"] * size, dim),
        "self_attn.o_proj": (dim, config["num_attention_heads"] * size),
        "mlp.gate_proj": (config["intermediate_size"], dim),
        "mlp.up_proj": (config["intermediate_size"], dim),
        "mlp.down_proj": (dim, config["intermediate_size"]),
    }
    if family == "phi3":
        qkv, gate_up = list(outs)[:3], list(outs)[4:6]
        outs["self_attn.qkv_proj"] = (sum(outs.pop(name)[0] for name in qkv), dim)
        outs["mlp.gate_up_proj"] = (sum(outs.pop(name)[0] for name in gate_up), dim)
    if family == "starcoder2":
        outs["mlp.c_fc"], outs["mlp.c_proj"] = outs.pop("mlp.up_proj"), outs.pop("mlp.down_proj")
        del outs["mlp.gate_proj"]
    has_bias = config.get("use_bias", False)
    biased = {
        "self_attn": config.get("attention_bias", has_bias),
        "mlp": config.get("mlp_bias", has_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if family in ("olmo2", "olmo3", "exaone4"):
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    found = {"model.embed_tokens.weight": made(config["vocab_size"], dim) * 2}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, shape in outs.items():
            found[f"{at}{name}.weight"] = made(*shape)
            of_qwen = family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj")
            if biased[name.split(".")[0]] or of_qwen:
                found[f"{at}{name}.bias"] = made(shape[0])
        for name in norms:
            found[f"{at}{name}.weight"] = made(dim) + 1
            if family == "starcoder2":
                found[f"{at}{name}.bias"] = made(dim)
        if family in ("qwen3", "gemma3_text", "olmo2", "olmo3", "exaone4"):
            for name in ("q", "k"):
                is_whole = family.startswith("olmo")
                width = outs[f"self_attn.{name}_proj"][0] if is_whole else size
                found[f"{at}self_attn.{name}_norm.weight"] = made(width) + 1
    found["model.norm.weight"] = made(dim) + 1
    if family == "starcoder2":
        found["model.norm.bias"] = made(dim)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = made(config["vocab_size"], dim)
    return found


def _weights_of_gpt2(config: dict[str, Any], made: Any) -> dict[str, np.ndarray]:
    dim = config["n_embd"]
    found = {
        "transformer.wte.weight": made(config["vocab_size"], dim) * 2,
        "transformer.wpe.weight": made(config["n_positions"], dim),
        "transformer.ln_f.weight": made(dim) + 1,
        "transformer.ln_f.bias": made(dim),
    }
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}."
        for name in ("ln_1", "ln_2"):
            found[f"{at}{name}.weight"], found[f"{at}{name}.bias"] = made(dim) + 1, made(dim)
        for name, out in (("attn.c_attn", 3 * dim), ("mlp.c_fc", 4 * dim)):
            found[f"{at}{name}.weight"], found[f"{at}{name}.bias"] = made(dim, out), made(out)
        for name, of in (("attn.c_proj", dim), ("mlp.c_proj", 4 * dim)):
            found[f"{at}{name}.weight"], found[f"{at}{name}.bias"] = made(of, dim), made(dim)
    return found


def write_folder(folder: Path, config: dict, weights: dict, files: int = 1) -> Path:
    """A folder as transformers saves it, with its weights in so many files."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    where = {name: f"model-{i % files + 1}-of-{files}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: weights[n] for n in names if where[n] == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return folder


# --- the forward passes ---------------------------------------------------------------------


def logits(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: Any) -> np.ndarray:
    """``[length, vocabulary]`` of float64 for one sequence of tokens."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    if config["model_type"] == "gpt2":
        return _gpt2(config, weights, tokens)
    return _llama(config, weights, tokens)


def _llama(config: dict[str, Any], w: dict[str, np.ndarray], tokens: Any) -> np.ndarray:
    family, size = config["model_type"], config["head_dim"]
    is_gemma = family.startswith("gemma")
    eps = config["norm_epsilon" if family == "starcoder2" else "rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if family == "starcoder2":
            x = x - x.mean(-1, keepdims=True)
        if f"{name}.weight" not in w:  # OLMo 2 has none before a block
            return x
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        return x * (w[name + ".weight"] + (1 if is_gemma else 0)) + w.get(f"{name}.bias", 0)

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    h = w["model.embed_tokens.weight"][tokens]
    if is_gemma:
        h = h * math.sqrt(config["hidden_size"])
    h = h * config.get("embedding_multiplier", 1.0)
    residual = config.get("residual_multiplier", 1.0)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        window = _window(config, i)
        is_local = family == "gemma3_text" and window is not None
        x = norm(h, at + "input_layernorm")
        if family == "phi3":
            ends = heads * size, (heads + kv_heads) * size
            q, k, v = np.split(dense(x, at + "self_attn.qkv_proj"), ends, -1)
        else:
            q, k, v = (dense(x, f"{at}self_attn.{each}_proj") for each in "qkv")
        if family == "olmo2":
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q = q.reshape(-1, heads, size)
        k, v = k.reshape(-1, kv_heads, size), v.reshape(-1, kv_heads, size)
        if family in ("qwen3", "gemma3_text"):
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        if family != "smollm3" or (i + 1) % 4 != 0:
            q, k = _turned(config, q, is_local), _turned(config, k, is_local)
        scale = config.get("attention_multiplier", size**-0.5)
        if family in ("gemma2", "gemma3_text"):
            scale = config["query_pre_attn_scalar"] ** -0.5
        cap = config.get("attn_logit_softcapping")
        out = _attention(q, k, v, scale, window, cap).reshape(len(tokens), -1)
        out = dense(out, at + "self_attn.o_proj")
        if family in ("gemma2", "gemma3_text", "olmo2"):
            h = h + norm(out, at + "post_attention_layernorm")
            x = norm(h, at + "pre_feedforward_layernorm")
        else:
            h = h + out * residual
            x = norm(h, at + "post_attention_layernorm")
        if family == "starcoder2":
            out = dense(_gelu_tanh(dense(x, at + "mlp.c_fc")), at + "mlp.c_proj")
        else:
            if family == "phi3":
                gate, up = np.split(dense(x, at + "mlp.gate_up_proj"), 2, -1)
            else:
                gate, up = dense(x, at + "mlp.gate_proj"), dense(x, at + "mlp.up_proj")
            gate = _gelu_tanh(gate) if is_gemma else gate / (1 + np.exp(-gate))
            out = dense(gate * up, at + "mlp.down_proj")
        if family in ("gemma2", "gemma3_text", "olmo2"):
            out = norm(out, at + "post_feedforward_layernorm")
        h = h + out * residual
    h = norm(h, "model.norm")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    found = h @ w[head + ".weight"].T / config.get("logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    return found if cap is None else cap * np.tanh(found / cap)


def _window(config: dict[str, Any], layer: int) -> int | None:
    family = config["model_type"]
    local = {
        "mistral": True,
        "phi3": "sliding_window" in config,
        "starcoder2": "sliding_window" in config,
        "gemma2": layer % 2 == 0,
        "gemma3_text": (layer + 1) % config.get("sliding_window_pattern", 6) != 0,
    }
    return config["sliding_window"] if local.get(family) else None


def _turned(config: dict[str, Any], x: np.ndarray, is_local: bool) -> np.ndarray:
    """Channel ``j`` turns with ``j + size / 2``, by the position times a frequency."""
    base = config["rope_local_base_freq"] if is_local else config["rope_theta"]
    scaling = {} if is_local else config.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    half = int(x.shape[-1] * config.get("partial_rotary_factor", 1.0)) // 2
    found = x.copy()
    for j in range(half):
        frequency, factor = base ** (-j / half), 1.0
        if kind == "linear":
            frequency /= scaling["factor"]
        if kind == "llama3":
            wave = 2 * math.pi / frequency
            old = scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            if wave > old / low:
                frequency /= scaling["factor"]
            elif wave >= old / high:
                smooth = (old / wave - low) / (high - low)
                frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        if kind == "yarn":
            old, size = scaling["original_max_position_embeddings"], x.shape[-1]
            ends = [
                size * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (32, 1)
            ]
            first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), size - 1)
            slow = min(max((j - first) / (last - first), 0), 1)
            frequency = frequency / scaling["factor"] * slow + frequency * (1 - slow)
            factor = 0.1 * math.log(scaling["factor"]) + 1
        if kind == "longrope":
            old = config["original_max_position_embeddings"]
            frequency /= scaling["long_factor" if len(x) > old else "short_factor"][j]
            ratio = config["max_position_embeddings"] / old
            factor = math.sqrt(1 + math.log(ratio) / math.log(old))
        for position in range(len(x)):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            a, b = x[position, :, j], x[position, :, j + half]
            found[position, :, j] = (a * cos - b * sin) * factor
            found[position, :, j + half] = (b * cos + a * sin) * factor
    return found


def _attention(q: Any, k: Any, v: Any, scale: float, window: Any, cap: Any) -> np.ndarray:
    found = np.empty_like(q)
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // k.shape[1])
        for i in range(len(q)):
            first = 0 if window is None else max(0, i - window + 1)
            seen = k[first : i + 1, shared] @ q[i, head] * scale
            if cap is not None:
                seen = cap * np.tanh(seen / cap)
            weights = np.exp(seen - seen.max())
            found[i, head] = weights @ v[first : i + 1, shared] / weights.sum()
    return found


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gpt2(config: dict[str, Any], w: dict[str, np.ndarray], tokens: Any) -> np.ndarray:
    w = {name.removeprefix("transformer."): array for name, array in w.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return x * w[name + ".weight"] + w[name + ".bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    heads, dim = config["n_head"], config["n_embd"]
    h = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for i in range(config["n_layer"]):
        at = f"h.{i}."
        q, k, v = np.split(dense(norm(h, at + "ln_1"), at + "attn.c_attn"), 3, -1)
        q, k, v = (x.reshape(len(tokens), heads, dim // heads) for x in (q, k, v))
        out = _attention(q, k, v, (dim // heads) ** -0.5, None, None).reshape(len(tokens), dim)
        h = h + dense(out, at + "attn.c_proj")
        x = _gelu_tanh(dense(norm(h, at + "ln_2"), at + "mlp.c_fc"))
        h = h + dense(x, at + "mlp.c_proj")
    return norm(h, "ln_f") @ w["wte.weight"].T
