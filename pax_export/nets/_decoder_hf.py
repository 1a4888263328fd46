"""What a ``config.json`` of transformers says, as the fields of a DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.nets._decoder_fields import Fields, mapping, shown, unknown_family, unsupported
from pax_export.nets._layer_kind import LayerKind, repeating
from pax_export.nn import RotaryScaling

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

Found = dict[str, Any]  # fields of a DecoderConfig


def fields_of_hf(config: Mapping[str, Any]) -> Found:
    """See `DecoderConfig.from_hf`."""
    fields = Fields(mapping(config, "config.json"), "config.json")
    family = fields.get("model_type", "none")
    if family == "gemma3" and "text_config" in config:
        # A model of text and images: the language model is a part of it.
        fields, family = fields.part("text_config"), "gemma3_text"
    if not isinstance(family, str) or family not in _FAMILIES:
        raise unknown_family(family, "config.json: model_type", sorted(_FAMILIES))
    return _FAMILIES[family](fields)


def _llama(fields: Fields) -> Found:
    return _common(fields, "llama")


def _mistral(fields: Fields) -> Found:
    return _common(fields, "mistral") | {"kinds": (LayerKind(window=_window(fields)),)}


def _qwen2(fields: Fields) -> Found:
    found = _common(fields, "qwen2") | {"kinds": _kinds_of_qwen(fields)}
    return found | {"projection_bias": True, "output_bias": False}


def _qwen3(fields: Fields) -> Found:
    found = _common(fields, "qwen3") | {"kinds": _kinds_of_qwen(fields)}
    return found | {"query_key_norm": True}


def _window(fields: Fields) -> int | None:
    return None if fields.get("sliding_window") is None else fields.size("sliding_window")


def _kinds_of_qwen(fields: Fields) -> tuple[LayerKind, ...]:
    layers = fields.layers("num_hidden_layers")
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.get("max_window_layers", layers)
    if not isinstance(first, int):  # 0 is one, too
        raise fields.wrong("max_window_layers", "an integer")
    default = [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(layers)
    ]
    return _kinds(fields, default, LayerKind(window=window), LayerKind())


def _gemma(fields: Fields) -> Found:
    return _common(fields, "gemma") | _of_gemma(fields)


def _gemma2(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    local = LayerKind(window=fields.size("sliding_window", 4096))
    own = {
        "kinds": _kinds(fields, default, local, LayerKind()),
        "post_norms": True,
        "attention_softcap": fields.optional("attn_logit_softcapping"),
        "logit_softcap": fields.optional("final_logit_softcapping"),
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
    }
    return _common(fields, "gemma2") | _of_gemma(fields) | own


def _gemma3(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    period = fields.size("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    usual = fields.number("rope_local_base_freq", 10000.0)
    ropes = fields.part("rope_parameters").part("sliding_attention")
    local_base = ropes.number("rope_theta", usual)
    local = LayerKind(fields.size("sliding_window", 4096), local_base, scaled=False)
    own = {
        "kinds": _kinds(fields, default, local, LayerKind()),
        "post_norms": True,
        "query_key_norm": True,
        "attention_softcap": fields.optional("attn_logit_softcapping"),
        "logit_softcap": fields.optional("final_logit_softcapping"),
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
    }
    base = {"rotary_base": _rope(fields, 1_000_000.0)[0]}
    return _common(fields, "gemma3") | _of_gemma(fields) | own | base


def _of_gemma(fields: Fields) -> dict[str, Any]:
    return {
        "activation": _activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "embed_scale": float(fields.size("hidden_size")) ** 0.5,
        "tied": fields.flag("tie_word_embeddings", True),
    }


def _gpt2(fields: Fields) -> Found:
    dim, heads = fields.size("n_embd"), fields.size("n_head")
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if fields.get(name, usual) != usual:
            raise unsupported(fields, name)
    return {
        "family": "gpt2",
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.layers("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": dim // heads,
        "hidden_dim": fields.size("n_inner", 4 * dim),
        "max_positions": fields.size("n_positions", 1024),
        "norm": "layer",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5, zero=True),
        "activation": _activation(fields, "activation_function", "gelu_new"),
        "gated": False,
        "projection_bias": True,
        "output_bias": True,
        "dense_bias": True,
        "positions": "learned",
        "tied": fields.flag("tie_word_embeddings", True),
    }


_FAMILIES: dict[str, Callable[[Fields], Found]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}


def _common(fields: Fields, family: str) -> dict[str, Any]:
    """What the families of Llama, Qwen and Gemma have in common."""
    dim, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    bias = fields.flag("attention_bias", False)
    base, scaling = _rope(fields, 10000.0)
    head_size = fields.size("head_dim", dim // heads)
    turned = fields.number("partial_rotary_factor", 1.0)
    return {
        "family": family,
        "vocab_size": fields.size("vocab_size"),
        "dim": dim,
        "num_layers": fields.layers("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.size("num_key_value_heads", heads),
        "head_size": head_size,
        "hidden_dim": fields.size("intermediate_size"),
        "max_positions": fields.size("max_position_embeddings", 2048),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, zero=True),
        "activation": _activation(fields, "hidden_act", "silu"),
        "projection_bias": bias,
        "output_bias": bias,
        "dense_bias": fields.flag("mlp_bias", False),
        "rotary_base": base,
        "rotary_size": None if turned == 1.0 else int(head_size * turned),
        "rotary_scaling": scaling,
        "tied": fields.flag("tie_word_embeddings", False),
    }


def _rope(fields: Fields, default: float) -> tuple[float, RotaryScaling | None]:
    """The base of the rotary embedding, and how it is scaled; in the old form and the new."""
    rope = fields.part("rope_parameters")
    rope = rope.part("full_attention") if "full_attention" in rope.values else rope
    base = rope.number("rope_theta", fields.number("rope_theta", default))
    scaling = rope if rope.values else fields.part("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, None
    if kind not in ("linear", "llama3", "yarn", "dynamic"):
        raise unsupported(fields, "rope_scaling", kind)
    names = (
        ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    )
    low, high = (1.0, 32.0) if kind == "yarn" else (1.0, 4.0)
    length = None
    if kind != "linear":
        name = "original_max_position_embeddings"
        own = scaling.get(name) is not None
        length = scaling.size(name) if own else fields.size("max_position_embeddings")
    return base, RotaryScaling(
        kind,
        scaling.number("factor", 1.0),
        length,
        scaling.number(names[0], low),
        scaling.number(names[1], high),
        scaling.optional("attention_factor"),
    )


def _kinds(
    fields: Fields, default: list[str], local: LayerKind, whole: LayerKind
) -> tuple[LayerKind, ...]:
    of_word = {"sliding_attention": local, "full_attention": whole}
    words = fields.words("layer_types", default)
    if len(words) < len(default):
        raise fields.wrong("layer_types", f"a word for each of the {len(default)} layers")
    words = words[: len(default)]  # those of a net that was cut to fewer layers
    for word in words:
        if word not in of_word:
            raise unsupported(fields, "layer_types", word)
    return repeating([of_word[word] for word in words])


def _activation(fields: Fields, name: str, usual: str) -> str:
    word = fields.get(name, usual)
    if not isinstance(word, str) or word not in _ACTIVATIONS:
        raise InvalidArgumentError(
            "A Decoder has no such activation.",
            where=f"{fields.where}: {name}",
            got=shown(word),
            write=" or ".join(map(repr, sorted(_ACTIVATIONS))),
        )
    return _ACTIVATIONS[word]
