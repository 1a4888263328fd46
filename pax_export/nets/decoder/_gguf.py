"""Converts GGUF metadata to a DecoderConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from pax_export.nets.decoder._fields import (
    BIASES,
    OPTIONAL,
    Fields,
    Keys,
    LayerKind,
    require_mapping,
    shortest_pattern,
    unknown_family_error,
    unsupported_error,
)
from pax_export.nets.decoder._hf import FAMILIES, YARN_BETAS
from pax_export.nn import RotaryScaling

GGUF_NAMES = {
    "dim": "embedding_length", "num_heads": "attention.head_count",
    "head_size": "attention.key_length", "num_layers": "block_count",
    "num_kv_heads": "attention.head_count_kv", "hidden_dim": "feed_forward_length",
    "max_positions": "context_length", "norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
LAYER_NORM_GGUF_NAMES = GGUF_NAMES | {"norm_eps": "attention.layer_norm_epsilon"}
#: Tensors of GGUF files with divisors of rotary frequencies, by kinds of `RotaryScaling`.
ROTARY_TENSORS = {
    "table": ("rope_freqs.weight",),
    "longrope": ("rope_factors_short.weight", "rope_factors_long.weight"),
}
#: Architectures with layer norms in GGUF files.
LAYER_NORMS = ("gpt2", "starcoder2")

_GGUF: dict[str, Any] = {
    "vocab_size": None, "context_length": 2048, "embedding_length": None, "block_count": None,
    "feed_forward_length": None, "attention.head_count": None, "attention.head_count_kv": None,
    "attention.key_length": None, "attention.value_length": None,
    "attention.layer_norm_rms_epsilon": None,
    "rope.dimension_count": None, "rope.freq_base": 10000.0, "rope.scaling.type": "linear",
    "rope.scaling.factor": None, "rope.scale_linear": None,
    "rope.scaling.original_context_length": None,
    "tokenizer.ggml.tokens": None,
}  # fmt: skip
_GGUF_FIXED: dict[str, tuple] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (-1, 1),
    # llama.cpp reads neither in these architectures.
    "rope.scaling.yarn_beta_fast": (YARN_BETAS[1],),
    "rope.scaling.yarn_beta_slow": (YARN_BETAS[0],),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
_GGUF_IGNORED = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"})


def _gguf_keys(fixed: dict[str, tuple] | None = None, **others: object) -> Keys:
    """The keys of an architecture; `others` are read."""
    unread = {name: allowed for name, allowed in _GGUF_FIXED.items() if name not in others}
    return Keys(_GGUF | others, unread | (fixed or {}), _GGUF_IGNORED)


def _gemma_gguf_keys(window: int | None, period: int, **others: object) -> Keys:
    fixed = {"attention.sliding_window_pattern": (period,)}
    return _gguf_keys(fixed, **{"attention.sliding_window": window}, **others)


GGUF_PERIODS = {"gemma2": 2, "gemma3": 6}  # the last layer of each period sees all positions
GGUF = {
    **{name: _gguf_keys() for name in ("llama", "qwen2", "qwen3", "gemma", "smollm3", "olmo2")},
    "gemma2": _gemma_gguf_keys(
        4096, GGUF_PERIODS["gemma2"], attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    ),
    "gemma3": _gemma_gguf_keys(
        None, GGUF_PERIODS["gemma3"],
        final_logit_softcapping=None, **{"rope.freq_base": None, "rope.freq_base_swa": 10000.0},
    ),
    # llama.cpp has no windows in this architecture, whatever the files say.
    "phi3": _gguf_keys(**{"attention.sliding_window": 0, "rope.scaling.attn_factor": None}),
    "granite": _gguf_keys(
        {"rope.scaling.finetuned": (True,)},  # False: no rotary embedding
        **dict.fromkeys(("embedding_scale", "attention.scale", "residual_scale", "logit_scale")),
    ),
    **{name: _gguf_keys(**{"attention.layer_norm_epsilon": None}) for name in LAYER_NORMS},
}  # fmt: skip
# Those that scale their logits by the width of the net, by their numbers of layers (27B).
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def _keys_of(metadata: Mapping[str, Any], family: str) -> Fields:
    """Returns the keys of one architecture without its prefix."""
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in metadata.items()
        if str(key).startswith(f"{family}.") or key == "tokenizer.ggml.tokens"
    }
    return Fields(own, f"GGUF metadata: {family}", GGUF[family])


def fields_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """See `DecoderConfig.from_gguf`."""
    family = require_mapping(metadata, "GGUF metadata").get("general.architecture", "none")
    if not isinstance(family, str) or family not in GGUF:
        raise unknown_family_error(family, "GGUF metadata: general.architecture", GGUF)
    keys = _keys_of(metadata, family)
    found = _read_sizes(keys, family) | dict(FAMILIES[family].fields)
    if family != "gpt2":
        found |= _read_rope(keys, found["head_size"])
    if family in LAYER_NORMS:
        found |= {"activation": "gelu_tanh", **dict.fromkeys(BIASES, True)}
    if family.startswith("gemma"):
        found |= _of_gemma(keys, family, found)
    if family == "smollm3":  # the fourth layer of each four rotates nothing
        kinds = [LayerKind(rotary_base=None if i % 4 else 0.0) for i in range(1, 5)]
        found["kinds"] = tuple(kinds[: found["num_layers"]])
    return found | (_of_granite(keys) if family == "granite" else {})


def _read_sizes(keys: Fields, family: str) -> dict[str, Any]:
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys.get(name), (list, tuple)):
            raise unsupported_error(keys, name)  # another number in each layer
    found = keys.sizes(LAYER_NORM_GGUF_NAMES if family in LAYER_NORMS else GGUF_NAMES, OPTIONAL)
    if keys.get("attention.value_length", found["head_size"]) != found["head_size"]:
        raise unsupported_error(keys, "attention.value_length")
    if keys.get("vocab_size"):
        tokens = keys.size("vocab_size")
    else:
        words = keys.need("tokenizer.ggml.tokens")
        if not isinstance(words, Sized):
            raise keys.wrong("tokenizer.ggml.tokens", "a list of words")
        tokens = len(words)
    # Tied, unless the file has a tensor ``output.weight``.
    return {**found, "family": family, "vocab_size": tokens, "tied": True}


def _read_rope(keys: Fields, head_size: int) -> dict[str, Any]:
    # Files of Llama pair neighboring channels; their weights are reordered to halves when read.
    found: dict[str, Any] = {"rotary_base": keys.number("rope.freq_base")}
    size = keys.optional_size("rope.dimension_count")
    if size not in (None, head_size):
        found["rotary_size"] = size
    result = keys.optional("rope.scaling.attn_factor")
    if result not in (None, 1.0):
        ones = (1.0,) * ((size or head_size) // 2)
        found["rotary_scaling"] = RotaryScaling("table", attention_factor=result, table=ones)
    kind = keys.get("rope.scaling.type")
    if kind not in ("none", "linear", "yarn"):
        raise unsupported_error(keys, "rope.scaling.type")
    # 0 and "none" both mean no scaling, whatever the factor is.
    named = [
        keys.optional(f"rope.{name}", zero=True) for name in ("scaling.factor", "scale_linear")
    ]
    factor = named[1] if named[0] is None else named[0]
    if factor and kind == "linear" and factor != 1.0:
        found["rotary_scaling"] = RotaryScaling(kind, factor)
    if factor and kind == "yarn":
        length = keys.optional_size("rope.scaling.original_context_length")
        length = length or keys.size("context_length")
        found["rotary_scaling"] = RotaryScaling(kind, factor, length, *YARN_BETAS)
    return found


def scaling_of_gguf(
    metadata: Mapping[str, Any], family: str, tables: Sequence[Sequence[float]]
) -> RotaryScaling:
    """Returns the scaling with the tables of a file: one, or those of short and long contexts."""
    if len(tables) == 1:
        return RotaryScaling("table", table=tuple(tables[0]))
    keys = _keys_of(metadata, family)
    length = keys.optional_size("rope.scaling.original_context_length")
    return RotaryScaling(
        "longrope",
        original_length=length or keys.size("context_length"),
        attention_factor=keys.optional("rope.scaling.attn_factor") or 1.0,
        table=tuple(tables[0]),
        long_table=tuple(tables[1]),
    )


def _of_gemma(keys: Fields, family: str, found: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"activation": "gelu_tanh", "embed_scale": float(found["dim"]) ** 0.5}
    if family == "gemma":
        return own
    period = GGUF_PERIODS[family]
    base = keys.number("rope.freq_base_swa") if family == "gemma3" else None
    local = LayerKind(keys.size("attention.sliding_window"), base, scaled=base is None)
    layers = found["num_layers"]
    kinds = [local if (i + 1) % period else LayerKind() for i in range(layers)]
    if layers == _SCALED_BY_WIDTH[family]:
        own["attention_scale"] = (found["dim"] / found["num_heads"]) ** -0.5
    if family == "gemma2":
        own["attention_softcap"] = keys.number("attn_logit_softcapping")
    own["logit_softcap"] = keys.optional("final_logit_softcapping")
    # In these files the scales of norms already include the added one.
    return own | {"kinds": shortest_pattern(kinds), "norm_offset": 0.0}


def _of_granite(keys: Fields) -> dict[str, Any]:
    # llama.cpp stores 0 for an absent factor.
    return {
        "embed_scale": keys.optional("embedding_scale", zero=True) or 1.0,
        "attention_scale": keys.optional("attention.scale", zero=True) or None,
        "residual_scale": keys.optional("residual_scale", zero=True) or 1.0,
        "logit_scale": 1 / keys.number("logit_scale"),
    }
