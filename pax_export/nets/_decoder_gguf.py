"""What the metadata of a GGUF file says, as the fields of a DecoderConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from pax_export.nets._decoder_fields import Fields, mapping, unknown_family, unsupported
from pax_export.nets._layer_kind import LayerKind, repeating
from pax_export.nn import RotaryScaling

_FAMILIES = ("gemma", "gemma2", "gemma3", "gpt2", "llama", "qwen2", "qwen3")
_PERIODS = {"gemma2": 2, "gemma3": 6}  # the last of so many layers sees everything
# Those that scale their logits by the width of the net, by their numbers of layers (27B).
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


class _Keys(Fields):
    """The keys of one architecture, without its name before them."""

    def __init__(self, values: Mapping[str, Any], family: str):
        own = {k.removeprefix(f"{family}."): v for k, v in values.items()}
        super().__init__(own, f"GGUF metadata: {family}")


def fields_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """See `DecoderConfig.from_gguf`."""
    family = mapping(metadata, "GGUF metadata").get("general.architecture", "none")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise unknown_family(family, "GGUF metadata: general.architecture", list(_FAMILIES))
    keys = _Keys(metadata, family)
    found = _sizes(keys, family) | _rope(keys)
    if family == "gpt2":
        found |= {
            "norm": "layer",
            "norm_eps": keys.number("attention.layer_norm_epsilon", 1e-5, zero=True),
            "activation": "gelu_tanh",
            "gated": False,
            "positions": "learned",
            **dict.fromkeys(("projection_bias", "output_bias", "dense_bias"), True),
        }
    if family == "qwen2":
        found["projection_bias"] = True
    if family in ("qwen3", "gemma3"):
        found["query_key_norm"] = True
    if family.startswith("gemma"):
        found |= _of_gemma(keys, family, found)
    elif keys.get("attention.sliding_window"):  # 0 says that there is none
        found["kinds"] = (LayerKind(window=keys.size("attention.sliding_window")),)
    return found


def _sizes(keys: _Keys, family: str) -> dict[str, Any]:
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys.get(name), (list, tuple)):
            raise unsupported(keys, name)  # another number in each layer
    if keys.get("expert_count"):
        raise unsupported(keys, "expert_count")
    dim, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    if keys.get("vocab_size"):
        tokens = keys.size("vocab_size")
    else:
        words = keys.need("tokenizer.ggml.tokens")
        if not isinstance(words, Sized):
            raise keys.wrong("tokenizer.ggml.tokens", "a list of words")
        tokens = len(words)
    return {
        "family": family,
        "vocab_size": tokens,
        "dim": dim,
        "num_layers": keys.layers("block_count"),
        "num_heads": heads,
        "num_kv_heads": keys.size("attention.head_count_kv", heads),
        "head_size": keys.size("attention.key_length", dim // heads),
        "hidden_dim": keys.size("feed_forward_length"),
        "max_positions": keys.size("context_length", 2048),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5, zero=True),
        "tied": True,  # unless there is a tensor ``output.weight``
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    # Files of Llama keep neighbours beside each other; their weights are put in halves when read.
    default = 1_000_000.0 if keys.where.endswith("gemma3") else 10000.0
    found: dict[str, Any] = {"rotary_base": keys.number("rope.freq_base", default)}
    if keys.get("rope.dimension_count") is not None:
        size = keys.size("rope.dimension_count")
        if size != keys.size("attention.key_length", size):
            found["rotary_size"] = size
    kind = keys.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        found["rotary_scaling"] = RotaryScaling(
            kind,
            keys.number("rope.scaling.factor", 1.0),
            keys.size("rope.scaling.original_context_length", keys.get("context_length")),
            1.0,
            32.0,
            keys.optional("rope.scaling.attn_factor"),
        )
    elif kind != "none":
        raise unsupported(keys, "rope.scaling.type")
    return found


def _of_gemma(keys: _Keys, family: str, found: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"activation": "gelu_tanh", "embed_scale": float(found["dim"]) ** 0.5}
    if family == "gemma":
        return own
    period = _PERIODS[family]
    base = 10000.0 if family == "gemma3" else None
    window = keys.size("attention.sliding_window", 4096)
    local = LayerKind(window, base, scaled=base is None)
    layers = found["num_layers"]
    kinds = [local if (i + 1) % period else LayerKind() for i in range(layers)]
    if layers == _SCALED_BY_WIDTH[family]:
        own["attention_scale"] = (found["dim"] / found["num_heads"]) ** -0.5
    if family == "gemma2":
        own["attention_softcap"] = keys.number("attn_logit_softcapping", 50.0)
        own["logit_softcap"] = keys.number("final_logit_softcapping", 30.0)
    # The one that is added to the scales of norms is in the weights of these files.
    return own | {"kinds": repeating(kinds), "post_norms": True, "norm_offset": 0.0}
