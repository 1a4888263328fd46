"""Converts GGUF metadata to a DecoderConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from pax_export.nets.decoder._fields import (
    Fields,
    require_mapping,
    unknown_family_error,
    unsupported_error,
)
from pax_export.nets.decoder._keys import (
    BIASES,
    FAMILY_FIELDS,
    GGUF,
    GGUF_NAMES,
    GGUF_PERIODS,
    LAYER_NORM_GGUF_NAMES,
    LAYER_NORMS,
    OPTIONAL,
    YARN_BETAS,
)
from pax_export.nets.decoder._layer_kind import LayerKind, shortest_pattern
from pax_export.nn import RotaryScaling

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
    found = _read_sizes(keys, family) | FAMILY_FIELDS.get(family, {})
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
        found["rotary_scaling"] = RotaryScaling(
            kind,
            factor,
            length or keys.size("context_length"),
            *YARN_BETAS,
        )
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
