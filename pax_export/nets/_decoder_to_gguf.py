"""Converts a DecoderConfig to GGUF metadata: the inverse of `DecoderConfig.from_gguf`."""

from __future__ import annotations

import dataclasses
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.nets._decoder_config import DecoderConfig
from pax_export.nets._decoder_keys import GGUF_NAMES, GPT2_GGUF_NAMES, OPTIONAL
from pax_export.nets._decoder_to_hf import check_same, no_such_net_error
from pax_export.nn import RotaryScaling, rotary_frequencies

#: The architectures of llama.cpp, by our families where another one has the same net.
_NAMES = {"mistral": "llama"}
_KNOWN = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2")
#: Architectures of llama.cpp whose queries are as wide as the net.
_SQUARE = ("qwen2", "gpt2")
#: Those whose head always is the embedding.
_TIED = ("gemma", "gemma2")
TITLE = "llama.cpp"


def config_of_gguf(config: DecoderConfig) -> DecoderConfig:
    """The configuration of the net in a GGUF file: rotary factors as a table, norms without 1 +."""
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        size = config.rotary_size or config.head_size
        plain = rotary_frequencies(size, config.rotary_base)
        factors = plain / rotary_frequencies(size, config.rotary_base, scaling)
        scaling = RotaryScaling("table", table=tuple(factors.astype("float32").tolist()))
    family = _NAMES.get(config.family, config.family)
    return dataclasses.replace(config, family=family, norm_offset=0.0, rotary_scaling=scaling)


def gguf_metadata(config: DecoderConfig, where: str) -> dict[str, Any]:
    """Returns the architecture's keys for a GGUF file.

    Raises:
        InvalidArgumentError: llama.cpp has no such architecture.
    """
    if config.family not in _KNOWN:
        raise no_such_net_error(config, TITLE, where, "")
    made = {"general.architecture": config.family}
    own = {f"{config.family}.{name}": value for name, value in _gguf_keys(config).items()}
    try:
        back = DecoderConfig.from_gguf({**made, **own})
    except InvalidArgumentError as error:
        raise no_such_net_error(config, TITLE, where, str(error.got)) from error
    # Stored with the tensors of a file.
    said = ("tied", "vocab_size", "projection_bias", "output_bias")
    back = dataclasses.replace(back, **{name: getattr(config, name) for name in said})
    table = config.rotary_scaling
    if table is not None and table.kind == "table":
        back = dataclasses.replace(back, rotary_scaling=table)
    if config.output_bias and config.family not in ("llama", "gpt2"):
        raise no_such_net_error(config, TITLE, where, "output_bias=True")
    if config.family in _SQUARE and config.num_heads * config.head_size != config.dim:
        raise no_such_net_error(config, TITLE, where, "num_heads * head_size is not dim")
    if config.family in _TIED and not config.tied:
        raise no_such_net_error(config, TITLE, where, "tied=False")
    check_same(config, back, TITLE, where)
    return {**made, **own}


def _gguf_keys(config: DecoderConfig) -> dict[str, Any]:
    gpt2 = config.family == "gpt2"
    names = GPT2_GGUF_NAMES if gpt2 else GGUF_NAMES
    made: dict[str, Any] = {"vocab_size": config.vocab_size}
    made |= {key: getattr(config, n) for n, key in names.items() if not (gpt2 and key in OPTIONAL)}
    made[names["norm_eps"]] = float(config.norm_eps)
    if gpt2:
        return made
    made |= {
        "attention.value_length": config.head_size,
        "rope.dimension_count": config.rotary_size or config.head_size,
        "rope.freq_base": float(config.rotary_base),
    }
    scaling = config.rotary_scaling
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        made |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
        if scaling.kind == "yarn":
            made["rope.scaling.original_context_length"] = scaling.original_length
            made["rope.scaling.yarn_beta_slow"] = float(scaling.low)
            made["rope.scaling.yarn_beta_fast"] = float(scaling.high)
    windows = [kind for kind in config.kinds if kind.window is not None]
    if windows and config.family in ("gemma2", "gemma3"):
        made["attention.sliding_window"] = windows[0].window
        if config.family == "gemma3":
            made["rope.freq_base_swa"] = float(windows[0].rotary_base or config.rotary_base)
    caps = {"attn": config.attention_softcap, "final": config.logit_softcap}
    return made | {f"{k}_logit_softcapping": float(v) for k, v in caps.items() if v is not None}
