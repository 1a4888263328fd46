"""Converts a ``config.json`` of transformers to a DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.nets.decoder._fields import (
    Fields,
    require_mapping,
    short_repr,
    unknown_family_error,
    unsupported_error,
)
from pax_export.nets.decoder._keys import (
    BIASES,
    FAMILY_FIELDS,
    FAMILY_NAMES,
    HF,
    HF_NAMES,
    OF_IMAGES,
    OPTIONAL,
    ROPES,
    YARN_BETAS,
)
from pax_export.nets.decoder._layer_kind import LayerKind, shortest_pattern
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
    config, where = require_mapping(config, "config.json"), "config.json"
    family = config.get("model_type")
    if isinstance(family, str) and family in OF_IMAGES:
        own, keys = OF_IMAGES[family]
        whole = Fields(config, where, keys)
        text = whole.part("text_config")
        # The whole model has the head, and does not change its logits.
        config = {**text, "tie_word_embeddings": whole.flag("tie_word_embeddings")}
        family, where = text.get("model_type", own), f"{where}: text_config"
        cap = config.pop("final_logit_softcapping", None)
        if cap is not None:
            raise unsupported_error(whole, "text_config: final_logit_softcapping", cap)
    if not isinstance(family, str) or family not in _FAMILIES:
        strange = [key for key in config if not any(key in keys for keys in HF.values())]
        name = "none" if family is None else family
        raise unknown_family_error(name, f"{where}: model_type", _FAMILIES, strange)
    return _FAMILIES[family](Fields(config, where, HF[family]))


def _llama(fields: Fields, family: str = "llama") -> Found:
    return (
        _common_fields(fields, family)
        | _read_biases(fields)
        | {"dense_bias": fields.flag("mlp_bias")}
    )


def _mistral(fields: Fields) -> Found:
    return _common_fields(fields, "mistral") | _read_window(fields)


def _qwen2(fields: Fields) -> Found:
    return _common_fields(fields, "qwen2") | {"kinds": _kinds_of_qwen(fields)}


def _qwen3(fields: Fields) -> Found:
    kinds = {"kinds": _kinds_of_qwen(fields)}
    return _common_fields(fields, "qwen3") | _read_biases(fields) | kinds


def _kinds_of_qwen(fields: Fields) -> tuple[LayerKind, ...]:
    layers = fields.layers("num_hidden_layers")
    used = fields.flag("use_sliding_window")
    window = fields.optional_size("sliding_window") if used else None
    first = fields.need("max_window_layers")
    if not isinstance(first, int):  # 0 is one, too
        raise fields.wrong("max_window_layers", "an integer")
    default = [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(layers)
    ]
    return _read_kinds(fields, default, window)


def _gemma(fields: Fields) -> Found:
    word = fields.get("hidden_act")
    # The first files of Gemma have "gelu", but use its approximation by tanh.
    activation = "gelu_tanh" if word == "gelu" else _read_activation(fields, "hidden_act")
    _require_same_activation(fields, "hidden_activation", activation)
    return _common_fields(fields, "gemma", activation) | _read_biases(fields) | _of_gemma(fields)


def _gemma2(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    window = fields.size("sliding_window")
    if fields.get("sliding_window_size", window) != window:  # the name in the first files
        raise unsupported_error(fields, "sliding_window_size")
    return _with_post_norms(fields, "gemma2") | {
        "kinds": _read_kinds(fields, default, window),
        "attention_softcap": fields.optional("attn_logit_softcapping"),
    }


def _gemma3(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    period = fields.size("sliding_window_pattern")
    if fields.get("layer_types") is None:
        if fields.get("_sliding_window_pattern", period) != period:
            raise unsupported_error(fields, "_sliding_window_pattern")
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    (base, scaling), (local_base, local_scaling) = _ropes_by_layer(
        fields, fields.number("rope_local_base_freq")
    )
    local = (local_base, local_scaling is not None)
    if local_scaling is not None and local_scaling != scaling:
        raise unsupported_error(fields, "rope_parameters: sliding_attention", local_scaling.kind)
    return _with_post_norms(fields, "gemma3") | {
        "kinds": _read_kinds(fields, default, fields.size("sliding_window"), *local),
        "rotary_base": base,
        "rotary_scaling": scaling,
    }


def _with_post_norms(fields: Fields, family: str) -> Found:
    """Returns the fields that Gemma 2 and 3 share."""
    activation = _read_activation(fields, "hidden_activation")
    _require_same_activation(fields, "hidden_act", activation)
    return {
        **_common_fields(fields, family, activation),
        **_read_biases(fields),
        **_of_gemma(fields),
        "logit_softcap": fields.optional("final_logit_softcapping"),
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
    }


def _of_gemma(fields: Fields) -> Found:
    return {"norm_offset": 1.0, "embed_scale": float(fields.size("hidden_size")) ** 0.5}


def _phi3(fields: Fields) -> Found:
    name = _rope_key(fields)
    rope = dict(fields.part(name))
    share = {key: rope.pop(key) for key in ("partial_rotary_factor",) if key in rope}
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # older names, in this family
        rope["rope_type"] = "longrope"
    fields = Fields({**fields.values, **share, name: rope}, fields.where, fields.keys)
    found = _common_fields(fields, "phi3") | _read_window(fields)
    size = int(found["head_size"] * fields.number("partial_rotary_factor"))
    if size % 2 or not 0 < size <= found["head_size"]:
        raise unsupported_error(fields, "partial_rotary_factor")
    return found | {"rotary_size": size}


def _smollm3(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    interval = fields.size("no_rope_layer_interval")
    turned = fields.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])
    if not isinstance(turned, (list, tuple)) or len(turned) < layers:
        raise fields.wrong("no_rope_layers", f"a number for each of the {layers} layers")
    window = fields.optional_size("sliding_window")
    used = fields.flag("use_sliding_window") and window is not None
    default = ["full_attention" if i or not used else "sliding_attention" for i in turned[:layers]]
    kinds = _read_layers(fields, default, window)
    kinds = [k if i else replace(k, rotary_base=0.0) for i, k in zip(turned, kinds)]
    return _llama(fields, "smollm3") | {"kinds": shortest_pattern(kinds)}


def _granite(fields: Fields) -> Found:
    return _llama(fields, "granite") | {
        "embed_scale": fields.number("embedding_multiplier"),
        "attention_scale": fields.number("attention_multiplier"),
        "residual_scale": fields.number("residual_multiplier"),
        "logit_scale": 1 / fields.number("logits_scaling"),
    }


def _olmo2(fields: Fields) -> Found:
    return _common_fields(fields, "olmo2") | _read_biases(fields)


def _olmo3(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    default = ["sliding_attention" if i % 4 else "full_attention" for i in range(1, layers + 1)]
    (base, scaling), (local_base, local_scaling) = _ropes_by_layer(fields, _OLMO3_BASE)
    if local_scaling is not None and local_scaling != scaling:
        raise unsupported_error(fields, "rope_parameters: sliding_attention", local_scaling.kind)
    window, local = fields.optional_size("sliding_window"), (local_base, local_scaling is not None)
    return _common_fields(fields, "olmo3") | _read_biases(fields) | {
        "kinds": _read_kinds(fields, default, window, *local),
        "rotary_base": base,
        "rotary_scaling": scaling,
    }  # fmt: skip


def _exaone4(fields: Fields) -> Found:
    layers, window = fields.layers("num_hidden_layers"), fields.optional_size("sliding_window")
    default = ["full_attention"] * layers
    if window is not None and fields.get("layer_types") is None:
        period = fields.size("sliding_window_pattern")
        default = ["sliding_attention" if i % period else default[0] for i in range(1, layers + 1)]
    kinds = _read_layers(fields, default, window)
    if window is not None:  # those that see all positions do not rotate
        kinds = [kind if kind.window else replace(kind, rotary_base=0.0) for kind in kinds]
    return _common_fields(fields, "exaone4") | {"kinds": shortest_pattern(kinds)}


def _ministral(fields: Fields) -> Found:
    window = fields.optional_size("sliding_window")
    word = "full_attention" if window is None else "sliding_attention"
    default = [word] * fields.layers("num_hidden_layers")
    return _common_fields(fields, "ministral") | {"kinds": _read_kinds(fields, default, window)}


def _seed_oss(fields: Fields) -> Found:
    return _common_fields(fields, "seed_oss") | {
        "projection_bias": fields.flag("attention_bias"),
        "output_bias": fields.flag("attention_out_bias"),
        "dense_bias": fields.flag("mlp_bias"),
    }


def _ernie4_5(fields: Fields) -> Found:
    return _common_fields(fields, "ernie4_5") | dict.fromkeys(BIASES, fields.flag("use_bias"))


def _helium(fields: Fields) -> Found:
    return _common_fields(fields, "helium") | {
        "projection_bias": fields.flag("attention_bias"),
        "dense_bias": fields.flag("mlp_bias"),
    }


def _starcoder2(fields: Fields) -> Found:
    biases = dict.fromkeys(BIASES, fields.flag("use_bias"))
    return _common_fields(fields, "starcoder2") | _read_window(fields) | biases


def _gpt2(fields: Fields) -> Found:
    return {
        **fields.sizes(FAMILY_NAMES["gpt2"], OPTIONAL),
        **FAMILY_FIELDS["gpt2"],
        "family": "gpt2",
        "activation": _read_activation(fields, "activation_function"),
    }


_FAMILIES: dict[str, Callable[[Fields], Found]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "ministral": _ministral,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "helium": _helium,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
}


#: Of OLMo 3's layers with windows, whatever `rope_theta` is; transformers gives it to the others.
_OLMO3_BASE = 500_000.0
#: Families whose layers with windows have a rotary embedding of their own.
_OWN_ROPES = ("gemma3", "olmo3")


def _common_fields(fields: Fields, family: str, activation: str | None = None) -> Found:
    """Returns the fields that the families of Llama, Qwen and Gemma share."""
    sizes = fields.sizes(FAMILY_NAMES.get(family, HF_NAMES), OPTIONAL)
    base, scaling = (None, None) if family in _OWN_ROPES else _read_rope(fields)
    return {
        **sizes,
        **FAMILY_FIELDS.get(family, {}),
        "family": family,
        "activation": activation or _read_activation(fields, "hidden_act"),
        "rotary_base": base,
        "rotary_scaling": scaling,
    }


def _read_window(fields: Fields) -> Found:
    window = fields.optional_size("sliding_window")
    if window is not None and window >= fields.size("max_position_embeddings"):
        window = None  # the same net, without a ring buffer as its cache
    return {"kinds": (LayerKind(window=window),)}


def _read_biases(fields: Fields) -> Found:
    return dict.fromkeys(("projection_bias", "output_bias"), fields.flag("attention_bias"))


# --- rotary embeddings ------------------------------------------------------------------------

Rope = tuple[float, RotaryScaling | None]  # the base, and how it is scaled


def _read_rope(fields: Fields) -> Rope:
    """The rotary embedding of all layers; the old form of its keys counts before the new one."""
    name = _rope_key(fields)
    own = fields.optional_size("original_max_position_embeddings")
    return _read_scaling(fields, fields.part(name), name, fields.number("rope_theta"), own)


def _rope_key(fields: Fields) -> str:
    return "rope_scaling" if fields.part("rope_scaling") else "rope_parameters"


def _ropes_by_layer(fields: Fields, local: float) -> tuple[Rope, Rope]:
    """Returns the rotary settings of layers with full attention, and of layers with a window.

    `local` is the latter's base where the part for it has none.
    """
    parts = dict(fields.part("rope_parameters"))
    found = {}
    for word in ("full_attention", "sliding_attention"):
        part = parts.pop(word, None)
        found[word] = require_mapping({} if part is None else part, f"{fields.where}: {word}")
    if any(value is not None for value in parts.values()):
        raise unsupported_error(fields, "rope_parameters", parts)
    old = fields.part("rope_scaling")
    if "type" in old and "rope_type" not in old:  # which transformers 5 does not read here
        raise unsupported_error(fields, "rope_scaling: type", old["type"])
    whole = {**found["full_attention"], **old}
    for each in (whole, found["sliding_attention"]):
        if each.get("truncate", True) is not True:
            raise unsupported_error(fields, "rope_parameters: truncate", each["truncate"])
    return (
        _read_scaling(fields, whole, "rope_scaling", fields.number("rope_theta")),
        _read_scaling(
            fields, found["sliding_attention"], "rope_parameters: sliding_attention",
            local,
        ),
    )  # fmt: skip


def _read_scaling(
    fields: Fields, values: Mapping[str, Any], name: str, base: float, length: int | None = None
) -> Rope:
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPES:
        raise unsupported_error(fields, name, kind)
    part = Fields(values, f"{fields.where}: {name}", ROPES[kind])
    base = part.optional("rope_theta") or base
    if kind == "default":
        return base, None
    most = fields.size("max_position_embeddings")
    if kind == "yarn":
        return base, _read_yarn(part, most, length)
    if kind == "longrope":
        return base, _read_longrope(part, most, length)
    if kind == "llama3":
        length = length or part.optional_size("original_max_position_embeddings") or most
        ends = part.number("low_freq_factor"), part.number("high_freq_factor")
        return base, RotaryScaling(kind, part.number("factor"), length, *ends)
    return base, RotaryScaling(kind, part.number("factor"))


def _read_longrope(part: Fields, most: int, length: int | None) -> RotaryScaling:
    length = length or part.optional_size("original_max_position_embeddings") or most
    tables = []
    for name in ("short_factor", "long_factor"):
        table = part.need(name)
        is_list = isinstance(table, (list, tuple))
        if not is_list or not all(isinstance(each, (int, float)) for each in table):
            raise part.wrong(name, "a list of numbers")
        tables.append(tuple(map(float, table)))
    return RotaryScaling(
        "longrope", part.optional("factor") or most / length, length, table=tables[0],
        long_table=tables[1], attention_factor=part.optional("attention_factor"),
    )  # fmt: skip


def _read_yarn(part: Fields, most: int, length: int | None) -> RotaryScaling:
    length = length or part.optional_size("original_max_position_embeddings") or most
    is_ratio = "factor" in part.values and part.get("factor") is None
    factor = most / length if is_ratio else part.number("factor")
    result = part.optional("attention_factor")
    scales = [part.optional(each, zero=True) for each in ("mscale", "mscale_all_dim")]
    if result is None and all(scales) and factor > 1:
        over, under = (0.1 * (each or 0.0) * math.log(factor) + 1.0 for each in scales)
        result = over / under
    return RotaryScaling(
        "yarn",
        factor,
        length,
        part.optional("beta_slow", zero=True) or YARN_BETAS[0],
        part.optional("beta_fast", zero=True) or YARN_BETAS[1],
        result,
        truncated=part.flag("truncate"),
    )


# --- layers and activations -------------------------------------------------------------------


def _read_kinds(fields: Fields, *settings: Any) -> tuple[LayerKind, ...]:
    return shortest_pattern(_read_layers(fields, *settings))


def _read_layers(
    fields: Fields, default: list[str], window: int | None, base: float | None = None,
    scaled: bool = True,
) -> list[LayerKind]:  # fmt: skip
    of_word = {"full_attention": LayerKind()}
    if window is not None:
        of_word["sliding_attention"] = LayerKind(window, base, scaled)
    words = fields.words("layer_types", default)
    if len(words) < len(default):
        raise fields.wrong("layer_types", f"a word for each of the {len(default)} layers")
    words = words[: len(default)]  # those of a net that was cut to fewer layers
    for word in words:
        if word not in of_word:
            raise unsupported_error(fields, "layer_types", word)
    return [of_word[word] for word in words]


def _read_activation(fields: Fields, name: str) -> str:
    word = fields.get(name)
    if not isinstance(word, str) or word not in _ACTIVATIONS:
        raise InvalidArgumentError(
            "The activation is unsupported by Decoder.",
            where=f"{fields.where}: {name}",
            got=short_repr(word),
            write=" or ".join(map(repr, sorted(_ACTIVATIONS))),
        )
    return _ACTIVATIONS[word]


def _require_same_activation(fields: Fields, name: str, activation: str) -> None:
    """Refuses a second key for the activation with a different value."""
    if fields.get(name) is not None and _read_activation(fields, name) != activation:
        raise unsupported_error(fields, name)
