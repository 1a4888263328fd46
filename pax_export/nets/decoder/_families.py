"""The families of transformers that a Decoder computes: a row of `FAMILIES` for each.

A row has the keys of the family's ``config.json`` and says how they become fields of a
DecoderConfig, and these keys again. Keys in none of the tables are refused by name; defaults are
those of the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pax_export.nets.decoder._config import DecoderConfig
from pax_export.nets.decoder._fields import (
    BIASES,
    Fields,
    Found,
    Keys,
    LayerKind,
    unsupported_error,
)
from pax_export.nets.decoder._generation import GENERATION
from pax_export.nets.decoder._hf import (
    FAMILIES,
    OF_IMAGES,
    Family,
    read_activation,
    read_layers,
    read_rope,
    require_same_activation,
    rope_key,
    ropes_by_layer,
    written_rope,
)

_WORDS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def keys_of_hf(config: DecoderConfig) -> dict[str, Any]:
    """The content of ``config.json`` for a configuration of one of these families."""
    own = FAMILIES[config.family]
    keys: dict[str, Any] = {"model_type": own.model_type or config.family}
    keys["architectures"] = [own.class_name]
    keys |= {key: getattr(config, name) for name, key in own.names.items()}
    if own.ropes != "none":
        keys["rope_theta"] = config.rotary_base
        if config.rotary_scaling is not None:
            keys["rope_scaling"] = written_rope(config.rotary_scaling)
    keys[own.activation_key] = _WORDS[config.activation]
    keys |= {key: getattr(config, flags[0]) for key, flags in own.flags.items()}
    return keys | own.write(config)


# --- keys -------------------------------------------------------------------------------------

# Origin of the file, training, tokens, and outputs of a call.
_IGNORED = GENERATION | frozenset(
    """
    model_type architectures auto_map _name_or_path name_or_path _commit_hash transformers_version
    transformers.js_config dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss
    unsloth_version unsloth_fixed is_llama_config max_sequence_length
    attention_dropout hidden_dropout embedding_dropout residual_dropout resid_pdrop embd_pdrop
    attn_pdrop initializer_range pretraining_tp finetuning_task gradient_checkpointing
    chunk_size_feed_forward is_decoder tie_encoder_decoder
    bos_token_id sep_token_id unk_token_id decoder_start_token_id
    tokenizer_class prefix
    id2label label2id num_labels _num_labels problem_type task_specific_params classifier_dropout
    output_hidden_states output_attentions return_dict use_cache cache_implementation
    attn_implementation _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset _experts_implementation_internal experts_implementation
    """.split()
)
# Settings that have only one supported value.
_FIXED: dict[str, tuple] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "quantization": (),
}
_ROPE = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
_NAMES = {
    "dim": "hidden_size", "num_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "hidden_dim": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}  # fmt: skip
# Where the configuration does not say whether there are biases, the arrays of the file do.
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias")


def like_llama(
    name: str, sizes: str, eps: float, tied: bool, *, keys: Mapping[str, Any] = {},
    fixed: Mapping[str, tuple] = {}, ignored: str = "", eps_name: str = "rms_norm_eps",
    flags: Mapping[str, tuple[str, ...]] = {}, **options: Any,
) -> Family:  # fmt: skip
    """A family of Llama's kind.

    Args:
        name: the prefix of its classes in transformers.
        sizes: the first defaults, those of the configuration class; ``-`` is None.
        eps: the default of the epsilon of norms.
        tied: the default of ``tie_word_embeddings``.
        keys: other keys with their defaults.
        fixed: keys with their only values.
        ignored: keys without effect.
        eps_name: the key of the epsilon.
        flags: as in `Family`; false by default.
        **options: those of `Family`.
    """
    size_keys = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    )  # fmt: skip
    defaults = {key: None if v == "-" else int(v) for key, v in zip(size_keys, sizes.split())}
    defaults |= {eps_name: eps, "tie_word_embeddings": tied, "hidden_act": "silu"}
    defaults |= {"original_max_position_embeddings": None, **_ROPE, **dict.fromkeys(flags, False)}
    defaults |= keys
    unread = {key: allowed for key, allowed in _FIXED.items() if key not in defaults}
    own = Keys(defaults, {**unread, **fixed}, _IGNORED | {*_BIASES, *ignored.split()})
    return Family(name + "ForCausalLM", own, _NAMES | {"norm_eps": eps_name}, flags, **options)


# --- parts that families read and write in their own way --------------------------------------


def _window(fields: Fields, found: Found) -> Found:
    window = fields.optional_size("sliding_window")
    if window is not None and window >= fields.size("max_position_embeddings"):
        window = None  # the same net, without a ring buffer as its cache
    return {"kinds": [LayerKind(window=window)]}


def _window_keys(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.kinds[0].window}


def _layer_keys(config: DecoderConfig) -> dict[str, Any]:
    """The window and the types of all layers."""
    kinds = [config.kind_of(number) for number in range(config.num_layers)]
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in kinds]
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    return {"layer_types": types, "sliding_window": window}


def _qwen(fields: Fields, found: Found) -> Found:
    layers = fields.layers("num_hidden_layers")
    used = fields.flag("use_sliding_window")
    window = fields.optional_size("sliding_window") if used else None
    first = fields.need("max_window_layers")
    if not isinstance(first, int):  # 0 is one, too
        raise fields.wrong("max_window_layers", "an integer")
    local = [window is not None and i >= first for i in range(layers)]
    return {"kinds": read_layers(fields, local, window)}


def _qwen_keys(config: DecoderConfig) -> dict[str, Any]:
    keys = _layer_keys(config)
    if keys["sliding_window"] is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": 0, **keys}


def _gemma(fields: Fields, found: Found) -> Found:
    word = fields.get("hidden_act")
    # The first files of Gemma have "gelu", but use its approximation by tanh.
    activation = "gelu_tanh" if word == "gelu" else read_activation(fields, "hidden_act")
    require_same_activation(fields, "hidden_activation", activation)
    return {"activation": activation, **_of_gemma(fields)}


def _of_gemma(fields: Fields) -> Found:
    return {"norm_offset": 1.0, "embed_scale": float(fields.size("hidden_size")) ** 0.5}


def _with_post_norms(fields: Fields) -> Found:
    """The fields that Gemma 2 and 3 share."""
    activation = read_activation(fields, "hidden_activation")
    require_same_activation(fields, "hidden_act", activation)
    return {
        "activation": activation,
        **_of_gemma(fields),
        "logit_softcap": fields.optional("final_logit_softcapping"),
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
    }


def _post_norm_keys(config: DecoderConfig) -> dict[str, Any]:
    keys = _layer_keys(config)
    power = (config.attention_scale or config.head_size**-0.5) ** -2
    return {
        "layer_types": keys["layer_types"],
        "query_pre_attn_scalar": round(power) if abs(power - round(power)) < 1e-6 else power,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": keys["sliding_window"] or config.max_positions,
    }


def _gemma2(fields: Fields, found: Found) -> Found:
    layers = fields.layers("num_hidden_layers")
    local = [i % 2 == 0 for i in range(layers)]
    window = fields.size("sliding_window")
    if fields.get("sliding_window_size", window) != window:  # the name in the first files
        raise unsupported_error(fields, "sliding_window_size")
    return _with_post_norms(fields) | {
        "kinds": read_layers(fields, local, window),
        "attention_softcap": fields.optional("attn_logit_softcapping"),
    }


def _gemma2_keys(config: DecoderConfig) -> dict[str, Any]:
    return _post_norm_keys(config) | {"attn_logit_softcapping": config.attention_softcap}


def _gemma3(fields: Fields, found: Found) -> Found:
    layers = fields.layers("num_hidden_layers")
    period = fields.size("sliding_window_pattern")
    if fields.get("layer_types") is None:
        if fields.get("_sliding_window_pattern", period) != period:
            raise unsupported_error(fields, "_sliding_window_pattern")
    local = [(i + 1) % period != 0 for i in range(layers)]
    base = fields.number("rope_local_base_freq")
    window = fields.size("sliding_window")
    return _with_post_norms(fields) | _ropes_and_kinds(fields, local, window, base)


def _ropes_and_kinds(
    fields: Fields, local: list[bool], window: int | None, local_base: float
) -> Found:
    """The rotary embedding of all layers, where those with windows have their own base."""
    (base, scaling), (local_base, local_scaling) = ropes_by_layer(fields, local_base)
    if local_scaling is not None and local_scaling != scaling:
        raise unsupported_error(fields, "rope_parameters: sliding_attention", local_scaling.kind)
    return {
        "kinds": read_layers(fields, local, window, local_base, local_scaling is not None),
        "rotary_base": base,
        "rotary_scaling": scaling,
    }


def _gemma3_keys(config: DecoderConfig) -> dict[str, Any]:
    local = next((kind.rotary_base for kind in config.kinds if kind.window), None)
    return _post_norm_keys(config) | {"rope_local_base_freq": local or config.rotary_base}


def _phi3(fields: Fields, found: Found) -> Found:
    name = rope_key(fields)
    rope = dict(fields.part(name))
    # Newer files have the share among the keys of the rotary embedding.
    key = "partial_rotary_factor"
    share = {key: rope.pop(key)} if key in rope else {}
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # older names, in this family
        rope["rope_type"] = "longrope"
    fields = Fields({**fields.values, **share, name: rope}, fields.where, fields.keys)
    base, scaling = read_rope(fields)
    size = int(found["head_size"] * fields.number(key))
    if size % 2 or not 0 < size <= found["head_size"]:
        raise unsupported_error(fields, key)
    return _window(fields, found) | {
        "rotary_base": base,
        "rotary_scaling": scaling,
        "rotary_size": size,
    }


def _phi3_keys(config: DecoderConfig) -> dict[str, Any]:
    share = (config.rotary_size or config.head_size) / config.head_size
    length = config.rotary_scaling and config.rotary_scaling.original_length
    long = {"original_max_position_embeddings": length} if length else {}
    return {**_window_keys(config), "partial_rotary_factor": share, **long}


def _smollm3(fields: Fields, found: Found) -> Found:
    layers = fields.layers("num_hidden_layers")
    interval = fields.size("no_rope_layer_interval")
    turned = fields.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])
    if not isinstance(turned, (list, tuple)) or len(turned) < layers:
        raise fields.wrong("no_rope_layers", f"a number for each of the {layers} layers")
    window = fields.optional_size("sliding_window")
    used = fields.flag("use_sliding_window") and window is not None
    kinds = read_layers(fields, [used and not i for i in turned[:layers]], window)
    return {"kinds": [k if i else replace(k, rotary_base=0.0) for i, k in zip(turned, kinds)]}


def _smollm3_keys(config: DecoderConfig) -> dict[str, Any]:
    keys = _layer_keys(config)
    bases = [config.kind_of(number).rotary_base for number in range(config.num_layers)]
    turned = [int((config.rotary_base if base is None else base) != 0) for base in bases]
    used = keys["sliding_window"] is not None
    return {**keys, "use_sliding_window": used, "no_rope_layers": turned}


_GRANITE = (
    "embedding_multiplier", "logits_scaling", "attention_multiplier", "residual_multiplier",
)  # fmt: skip


def _granite(fields: Fields, found: Found) -> Found:
    embed, logits, attention, residual = map(fields.number, _GRANITE)
    return {
        "embed_scale": embed, "logit_scale": 1 / logits, "attention_scale": attention,
        "residual_scale": residual,
    }  # fmt: skip


def _granite_keys(config: DecoderConfig) -> dict[str, Any]:
    attention = config.attention_scale or config.head_size**-0.5
    scales = config.embed_scale, 1 / config.logit_scale, attention, config.residual_scale
    return dict(zip(_GRANITE, scales))


#: Of OLMo 3's layers with windows, whatever `rope_theta` is; transformers gives it to the others.
_OLMO3_BASE = 500_000.0


def _olmo3(fields: Fields, found: Found) -> Found:
    layers = fields.layers("num_hidden_layers")
    local = [(i + 1) % 4 != 0 for i in range(layers)]
    window = fields.optional_size("sliding_window")
    return _ropes_and_kinds(fields, local, window, _OLMO3_BASE)


def _exaone4(fields: Fields, found: Found) -> Found:
    layers, window = fields.layers("num_hidden_layers"), fields.optional_size("sliding_window")
    local = [False] * layers
    if window is not None and fields.get("layer_types") is None:
        period = fields.size("sliding_window_pattern")
        local = [(i + 1) % period != 0 for i in range(layers)]
    kinds = read_layers(fields, local, window)
    if window is not None:  # those that see all positions do not rotate
        kinds = [kind if kind.window else replace(kind, rotary_base=0.0) for kind in kinds]
    return {"kinds": kinds}


def _ministral(fields: Fields, found: Found) -> Found:
    window = fields.optional_size("sliding_window")
    local = [window is not None] * fields.layers("num_hidden_layers")
    return {"kinds": read_layers(fields, local, window)}


def _gpt2_keys(config: DecoderConfig) -> dict[str, Any]:
    return {"activation_function": "gelu_new"} if config.activation == "gelu_tanh" else {}


# --- the families -----------------------------------------------------------------------------

_ATTENTION: dict[str, tuple[str, ...]] = {"attention_bias": ("projection_bias", "output_bias")}
_LLAMA = _ATTENTION | {"mlp_bias": ("dense_bias",)}
_QWEN: dict[str, Any] = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}
_GEMMA2: dict[str, Any] = {
    "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
_OLMO = {
    "pre_norms": False, "post_norms": True, "query_key_norm": True, "norm_per_head": False,
}  # fmt: skip
_GPT2_NAMES = {
    "dim": "n_embd", "num_heads": "n_head", "vocab_size": "vocab_size", "num_layers": "n_layer",
    "hidden_dim": "n_inner", "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}  # fmt: skip
FAMILIES |= {
    "llama": like_llama("Llama", "32000 4096 11008 32 32 - - 2048", 1e-6, False, flags=_LLAMA),
    "mistral": like_llama(
        "Mistral", "32000 4096 14336 32 32 8 - 131072", 1e-6, False,
        keys={"sliding_window": 4096}, read=_window, write=_window_keys,
    ),
    "qwen2": like_llama(
        "Qwen2", "151936 4096 22016 32 32 32 - 32768", 1e-6, False, keys=_QWEN,
        fields={"projection_bias": True}, read=_qwen, write=_qwen_keys,
    ),
    "qwen3": like_llama(
        "Qwen3", "151936 4096 22016 32 32 32 128 32768", 1e-6, False, keys=_QWEN,
        flags=_ATTENTION, fields={"query_key_norm": True}, read=_qwen, write=_qwen_keys,
    ),
    "gemma": like_llama(
        "Gemma", "256000 3072 24576 28 16 16 256 8192", 1e-6, True, keys=_GEMMA,
        flags=_ATTENTION, read=_gemma, activation_key="hidden_activation",
    ),
    "gemma2": like_llama(
        "Gemma2", "256000 2304 9216 26 8 4 256 8192", 1e-6, True,
        keys=_GEMMA2 | {
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "sliding_window_size": None,
        },
        flags=_ATTENTION, fields={"post_norms": True}, read=_gemma2, write=_gemma2_keys,
        activation_key="hidden_activation",
    ),
    "gemma3": like_llama(
        "Gemma3", "262208 2304 9216 26 8 4 256 131072", 1e-6, True,
        fixed={"original_max_position_embeddings": (), "attn_logit_softcapping": ()},
        keys=_GEMMA2 | {
            "final_logit_softcapping": None, "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,
        },
        flags=_ATTENTION, fields={"post_norms": True, "query_key_norm": True}, read=_gemma3,
        write=_gemma3_keys, activation_key="hidden_activation", ropes="read",
        model_type="gemma3_text",
    ),
    "phi3": like_llama(
        "Phi3", "32064 3072 8192 32 32 - - 4096", 1e-5, False,
        keys={
            "sliding_window": None, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        fixed={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        read=_phi3, write=_phi3_keys, ropes="read",
    ),
    "smollm3": like_llama(
        "SmolLM3", "128256 2048 11008 36 16 4 - 32768", 1e-6, True, ignored="max_window_layers",
        keys={
            "rope_theta": 2_000_000.0, "no_rope_layers": None, "no_rope_layer_interval": 4,
            "layer_types": None, "use_sliding_window": False, "sliding_window": None,
        },
        flags=_LLAMA, read=_smollm3, write=_smollm3_keys,
    ),
    "granite": like_llama(
        "Granite", "32000 4096 11008 32 32 - - 2048", 1e-6, False,
        keys=dict.fromkeys(_GRANITE, 1.0), flags=_LLAMA, read=_granite, write=_granite_keys,
    ),
    "olmo2": like_llama(
        "Olmo2", "50304 4096 11008 32 32 - - 2048", 1e-5, False, flags=_ATTENTION, fields=_OLMO
    ),
    "olmo3": like_llama(
        "Olmo3", "50304 4096 11008 32 32 - - 2048", 1e-5, False,
        fixed={"original_max_position_embeddings": ()},
        keys={"rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
        flags=_ATTENTION, fields=_OLMO, read=_olmo3, write=_layer_keys, ropes="read",
    ),
    "exaone4": like_llama(
        "Exaone4", "102400 4096 16384 32 32 32 - 2048", 1e-5, False,
        keys={"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        fields={"pre_norms": False, "post_norms": True, "query_key_norm": True}, read=_exaone4,
        write=_layer_keys,
    ),
    "ministral": like_llama(
        "Ministral", "32000 4096 14336 32 32 8 - 131072", 1e-6, False,
        keys={"sliding_window": 4096, "layer_types": None}, read=_ministral, write=_layer_keys,
    ),
    "seed_oss": like_llama(
        "SeedOss", "155136 4096 27648 64 80 8 128 524288", 1e-6, False,
        keys={"attention_bias": True},
        flags={
            "attention_bias": ("projection_bias",), "mlp_bias": ("dense_bias",),
            "attention_out_bias": ("output_bias",),
        },
    ),
    "ernie4_5": like_llama(
        "Ernie4_5", "103424 1024 3072 18 16 2 128 131072", 1e-5, True,
        keys={"rope_theta": 500_000.0}, flags={"use_bias": BIASES},
        fields={"rotary_pairing": "neighbors"},
    ),
    "helium": like_llama(
        "Helium", "48000 2560 7040 24 20 20 128 4096", 1e-8, False, keys={"rope_theta": 100_000.0},
        flags={"attention_bias": ("projection_bias",), "mlp_bias": ("dense_bias",)},
        fields={"rotary_pairing": "neighbors"},
    ),
    "starcoder2": like_llama(
        "Starcoder2", "49152 3072 12288 30 24 2 - 4096", 1e-5, True, eps_name="norm_epsilon",
        fixed={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
        ignored="activation_function layer_norm_epsilon scale_attn_weights "
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
        keys={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True},
        flags={"use_bias": BIASES}, fields={"norm": "layer", "gated": False}, read=_window,
        write=_window_keys,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        Keys(
            {
                "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
                "n_head": 12, "n_inner": None, "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            },
            _FIXED | {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
            _IGNORED | {
                "n_ctx", "n_special", "predict_special_tokens", "output_past",
                "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
                "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
            },
        ),
        _GPT2_NAMES,
        fields={"norm": "layer", "gated": False, "positions": "learned"}
        | dict.fromkeys(BIASES, True),
        write=_gpt2_keys, activation_key="activation_function", ropes="none",
    ),
}  # fmt: skip

OF_IMAGES |= {
    kind: (text, Keys({"text_config": None, "tie_word_embeddings": True}, _FIXED,
                      _IGNORED | {"vision_config", "image_token_index", "image_token_id"} | own))
    for kind, text, own in (
        ("gemma3", "gemma3_text", {
            "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "boi_token_id",
            "eoi_token_id",
        }),
        ("mistral3", "mistral", {
            "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias",
            "spatial_merge_size",
        }),
    )
}  # fmt: skip
