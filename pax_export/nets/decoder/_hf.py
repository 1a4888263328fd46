"""Reads a ``config.json``: what a family is, and the parts that families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pax_export._foundations.errors import InvalidArgumentError
from pax_export.nets.decoder._fields import (
    OPTIONAL,
    Fields,
    Found,
    Keys,
    LayerKind,
    require_mapping,
    short_repr,
    shortest_pattern,
    unknown_family_error,
    unsupported_error,
)
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


def _nothing(*_: Any) -> Found:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models: what its configuration says, read and written.

    Attributes:
        class_name: its class in transformers.
        keys: the keys of its ``config.json``.
        names: the keys of the sizes.
        flags: for each key that is true or false, the fields of a DecoderConfig that it is.
        fields: fields that all its models have; files do not mention them.
        read: other fields, from the configuration and those read so far.
        write: the keys of these fields, of a DecoderConfig.
        activation_key: the key of the activation.
        ropes: ``"one"`` in the keys of most families, ``"read"`` by `read`, or ``"none"``.
        model_type: its name in ``config.json``, if that is another one.
    """

    class_name: str
    keys: Keys
    names: Mapping[str, str]
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Fields, Found], Found] = _nothing
    write: Callable[[Any], dict[str, Any]] = _nothing
    activation_key: str = "hidden_act"
    ropes: Literal["one", "read", "none"] = "one"
    model_type: str = ""


#: By the family of a DecoderConfig; `_families` has the rows.
FAMILIES: dict[str, Family] = {}
#: Models of text and images, which contain the language model: its family, and their keys.
OF_IMAGES: dict[str, tuple[str, Keys]] = {}


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
    names = {each.model_type or name: name for name, each in FAMILIES.items()}
    if not isinstance(family, str) or family not in names:
        known = [each.keys for each in FAMILIES.values()]
        strange = [key for key in config if not any(key in keys for keys in known)]
        shown = "none" if family is None else family
        raise unknown_family_error(shown, f"{where}: model_type", names, strange)
    own = FAMILIES[names[family]]
    fields = Fields(config, where, own.keys)
    found = {**fields.sizes(own.names, OPTIONAL), **own.fields, "family": names[family]}
    if own.ropes == "one":
        found["rotary_base"], found["rotary_scaling"] = read_rope(fields)
    for key, flags in own.flags.items():
        found |= dict.fromkeys(flags, fields.flag(key))
    found |= own.read(fields, found)
    if "activation" not in found:
        found["activation"] = read_activation(fields, own.activation_key)
    if "kinds" in found:
        found["kinds"] = shortest_pattern(found["kinds"])
    return found


# --- rotary embeddings ------------------------------------------------------------------------

Rope = tuple[float, RotaryScaling | None]  # the base, and how it is scaled


def read_rope(fields: Fields) -> Rope:
    """The rotary embedding of all layers; the old form of its keys counts before the new one."""
    name = rope_key(fields)
    own = fields.optional_size("original_max_position_embeddings")
    return _read_scaling(fields, fields.part(name), name, fields.number("rope_theta"), own)


def rope_key(fields: Fields) -> str:
    return "rope_scaling" if fields.part("rope_scaling") else "rope_parameters"


def ropes_by_layer(fields: Fields, local: float) -> tuple[Rope, Rope]:
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


def written_rope(scaling: RotaryScaling) -> dict[str, Any]:
    """The keys of a scaling: the inverse of `read_rope`."""
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        fields |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
        fields["truncate"] = scaling.truncated
    if scaling.kind == "longrope":
        fields |= {"short_factor": scaling.table, "long_factor": scaling.long_table}
    if scaling.kind in ("yarn", "longrope") and scaling.attention_factor is not None:
        fields["attention_factor"] = scaling.attention_factor
    return fields


# --- layers and activations -------------------------------------------------------------------


def read_layers(
    fields: Fields, local: list[bool], window: int | None, base: float | None = None,
    scaled: bool = True,
) -> list[LayerKind]:  # fmt: skip
    """The kind of each layer: `local` says which have a window, unless the file does."""
    of_word = {"full_attention": LayerKind()}
    if window is not None:
        of_word["sliding_attention"] = LayerKind(window, base, scaled)
    default = ["sliding_attention" if each else "full_attention" for each in local]
    words = fields.words("layer_types", default)
    if len(words) < len(local):
        raise fields.wrong("layer_types", f"a word for each of the {len(local)} layers")
    words = words[: len(local)]  # those of a net that was cut to fewer layers
    for word in words:
        if word not in of_word:
            raise unsupported_error(fields, "layer_types", word)
    return [of_word[word] for word in words]


def read_activation(fields: Fields, name: str) -> str:
    word = fields.get(name)
    if not isinstance(word, str) or word not in _ACTIVATIONS:
        raise InvalidArgumentError(
            "The activation is unsupported by Decoder.",
            where=f"{fields.where}: {name}",
            got=short_repr(word),
            write=" or ".join(map(repr, sorted(_ACTIVATIONS))),
        )
    return _ACTIVATIONS[word]


def require_same_activation(fields: Fields, name: str, activation: str) -> None:
    """Refuses a second key for the activation with a different value."""
    if fields.get(name) is not None and read_activation(fields, name) != activation:
        raise unsupported_error(fields, name)
