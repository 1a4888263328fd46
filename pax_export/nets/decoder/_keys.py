"""Configuration keys of each model family: read, fixed or ignored.

The defaults of a ``config.json`` are those of the configuration classes of transformers. Keys in
none of these tables are refused by name.
"""

from __future__ import annotations

from typing import Any

from pax_export.nets.decoder._fields import Keys

# --- names of the fields of a DecoderConfig ----------------------------------------------------

HF_NAMES = {
    "dim": "hidden_size", "num_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "hidden_dim": "intermediate_size",
    "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}  # fmt: skip
GPT2_NAMES = {
    "dim": "n_embd", "num_heads": "n_head", "vocab_size": "vocab_size", "num_layers": "n_layer",
    "hidden_dim": "n_inner", "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}  # fmt: skip
#: The names in config.json by family, where they are not `HF_NAMES`.
FAMILY_NAMES = {"gpt2": GPT2_NAMES, "starcoder2": HF_NAMES | {"norm_eps": "norm_epsilon"}}
GGUF_NAMES = {
    "dim": "embedding_length", "num_heads": "attention.head_count",
    "head_size": "attention.key_length", "num_layers": "block_count",
    "num_kv_heads": "attention.head_count_kv", "hidden_dim": "feed_forward_length",
    "max_positions": "context_length", "norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
LAYER_NORM_GGUF_NAMES = GGUF_NAMES | {"norm_eps": "attention.layer_norm_epsilon"}
#: Architectures with layer norms in GGUF files.
LAYER_NORMS = ("gpt2", "starcoder2")
#: Fields of a DecoderConfig that all models of a family have; files do not mention them.
BIASES = ("projection_bias", "output_bias", "dense_bias")
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {"projection_bias": True},
    "qwen3": {"query_key_norm": True},
    "gemma2": {"post_norms": True},
    "gemma3": {"post_norms": True, "query_key_norm": True},
    "olmo2": {
        "pre_norms": False, "post_norms": True, "query_key_norm": True, "norm_per_head": False,
    },
    "olmo3": {
        "pre_norms": False, "post_norms": True, "query_key_norm": True, "norm_per_head": False,
    },
    "exaone4": {"pre_norms": False, "post_norms": True, "query_key_norm": True},
    "ernie4_5": {"rotary_pairing": "neighbors"},
    "helium": {"rotary_pairing": "neighbors"},
    "starcoder2": {"norm": "layer", "gated": False},
    "gpt2": {"norm": "layer", "gated": False, "positions": "learned"}
    | dict.fromkeys(BIASES, True),
}  # fmt: skip
#: Keys that may be null or missing; the sizes of the others determine them.
OPTIONAL = frozenset(
    "num_key_value_heads head_dim n_inner attention.head_count_kv attention.key_length".split()
)

# --- config.json ----------------------------------------------------------------------------

# Generation: those that `read_defaults` takes where there is no generation_config.json.
GENERATION = frozenset(
    """
    eos_token_id pad_token_id
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
)
# Origin of the file, training, tokens, and outputs of a call.
_OTHERS = frozenset(
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
_IGNORED = GENERATION | _OTHERS
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
# Where the configuration does not say whether there are biases, the arrays of the file do.
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias")


def _family_keys(
    sizes: str, eps: float, tied: bool, *, eps_name: str = "rms_norm_eps",
    fixed: dict[str, tuple] | None = None, ignored: str = "", **others: object,
) -> Keys:  # fmt: skip
    """The keys of a family of Llama's kind; `sizes` are the first defaults."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    )  # fmt: skip
    defaults = {n: None if v == "-" else int(v) for n, v in zip(names, sizes.split())}
    defaults |= {eps_name: eps, "tie_word_embeddings": tied}
    defaults |= {"original_max_position_embeddings": None, **_ROPE, **others}
    unread = {name for name in _BIASES if name not in defaults}
    unfixed = {name: allowed for name, allowed in _FIXED.items() if name not in defaults}
    return Keys(defaults, unfixed | (fixed or {}), _IGNORED | unread | {*ignored.split()})


_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")

HF = {
    "llama": _family_keys(
        "32000 4096 11008 32 32 - - 2048", 1e-6, False,
        hidden_act="silu", attention_bias=False, mlp_bias=False,
    ),
    "mistral": _family_keys(
        "32000 4096 14336 32 32 8 - 131072", 1e-6, False, hidden_act="silu", sliding_window=4096
    ),
    "qwen2": _family_keys("151936 4096 22016 32 32 32 - 32768", 1e-6, False, **_QWEN),
    "qwen3": _family_keys(
        "151936 4096 22016 32 32 32 128 32768", 1e-6, False, attention_bias=False, **_QWEN
    ),
    "gemma": _family_keys(
        "256000 3072 24576 28 16 16 256 8192", 1e-6, True,
        **_GEMMA,
    ),
    "gemma2": _family_keys(
        "256000 2304 9216 26 8 4 256 8192", 1e-6, True,
        **_GEMMA2, **dict(zip(_SOFTCAPS, (50.0, 30.0))), sliding_window_size=None,
    ),
    "gemma3_text": _family_keys(
        "262208 2304 9216 26 8 4 256 131072", 1e-6, True,
        fixed={"original_max_position_embeddings": (), "attn_logit_softcapping": ()},
        **(_GEMMA2 | {
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6, "_sliding_window_pattern": None,
        }),
    ),
    "phi3": _family_keys(
        "32064 3072 8192 32 32 - - 4096", 1e-5, False, hidden_act="silu", sliding_window=None,
        original_max_position_embeddings=4096, partial_rotary_factor=1.0,
        fixed={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
    ),
    "smollm3": _family_keys(
        "128256 2048 11008 36 16 4 - 32768", 1e-6, True, ignored="max_window_layers",
        hidden_act="silu", attention_bias=False, mlp_bias=False, rope_theta=2_000_000.0,
        no_rope_layers=None, no_rope_layer_interval=4, layer_types=None, use_sliding_window=False,
        sliding_window=None,
    ),
    "granite": _family_keys(
        "32000 4096 11008 32 32 - - 2048", 1e-6, False,
        hidden_act="silu", attention_bias=False, mlp_bias=False, embedding_multiplier=1.0,
        logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
    ),
    "olmo2": _family_keys(
        "50304 4096 11008 32 32 - - 2048", 1e-5, False, hidden_act="silu", attention_bias=False
    ),
    "olmo3": _family_keys(
        "50304 4096 11008 32 32 - - 2048", 1e-5, False, hidden_act="silu", attention_bias=False,
        fixed={"original_max_position_embeddings": ()},
        rope_theta=500_000.0, sliding_window=4096, layer_types=None,
    ),
    "exaone4": _family_keys(
        "102400 4096 16384 32 32 32 - 2048", 1e-5, False, hidden_act="silu", sliding_window=4096,
        sliding_window_pattern=4, layer_types=None,
    ),
    "ministral": _family_keys(
        "32000 4096 14336 32 32 8 - 131072", 1e-6, False, hidden_act="silu", sliding_window=4096,
        layer_types=None,
    ),
    "seed_oss": _family_keys(
        "155136 4096 27648 64 80 8 128 524288", 1e-6, False, hidden_act="silu",
        attention_bias=True, attention_out_bias=False, mlp_bias=False,
    ),
    "ernie4_5": _family_keys(
        "103424 1024 3072 18 16 2 128 131072", 1e-5, True, hidden_act="silu", use_bias=False,
        rope_theta=500_000.0,
    ),
    "helium": _family_keys(
        "48000 2560 7040 24 20 20 128 4096", 1e-8, False, hidden_act="silu", attention_bias=False,
        mlp_bias=False, rope_theta=100_000.0,
    ),
    "starcoder2": _family_keys(
        "49152 3072 12288 30 24 2 - 4096", 1e-5, True, eps_name="norm_epsilon",
        fixed={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
        ignored="activation_function layer_norm_epsilon scale_attn_weights "
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
        hidden_act="gelu_pytorch_tanh", sliding_window=None, use_bias=True,
    ),
    "gpt2": Keys(
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        _FIXED | {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        _IGNORED | {
            "n_ctx", "n_special", "predict_special_tokens", "output_past",
            "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
            "summary_proj_to_labels", "summary_first_dropout",
        },
    ),
}  # fmt: skip

#: Models of text and images, which contain the language model: its family, and their keys.
OF_IMAGES = {
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

_LONGROPE = ("factor", "original_max_position_embeddings", "attention_factor")
_ROPE_KEYS = {"rope_type": None, "type": None, "rope_theta": None}
_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "dynamic": {"factor": None},
    "llama3": dict.fromkeys(
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    ),
    "yarn": {
        "factor": None, "original_max_position_embeddings": None, "attention_factor": None,
        "beta_fast": None, "beta_slow": None, "mscale": None, "mscale_all_dim": None,
        "truncate": True,
    },
    "longrope": dict.fromkeys(("short_factor", "long_factor", *_LONGROPE)),
}  # fmt: skip
# Kinds of rotary scaling, and their keys; other keys are ignored.
ROPES = {
    kind: Keys(
        _ROPE_KEYS | own,
        {"partial_rotary_factor": (1.0,)},
        {key for other in _ROPES.values() for key in other if key not in own} | {"finetuned"},
    )
    for kind, own in _ROPES.items()
}

#: `beta_slow` and `beta_fast` of llama.cpp, and the defaults of transformers.
YARN_BETAS = (1.0, 32.0)

# --- GGUF -----------------------------------------------------------------------------------

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
    "gemma2": _gemma_gguf_keys(4096, GGUF_PERIODS["gemma2"], **dict(zip(_SOFTCAPS, (50.0, 30.0)))),
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
