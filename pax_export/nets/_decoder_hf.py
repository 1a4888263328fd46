"""What a ``config.json`` of transformers says, as the fields of a DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pax_export._errors import InvalidArgumentError, PaxError, a_few
from pax_export.nets._layer_kind import LayerKind, repeating
from pax_export.nn import RotaryScaling, integer

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


#: No net has a larger size, nor more layers.
_LARGEST, _MOST_LAYERS = 1 << 31, 10_000


@contextmanager
def described_by(where: str) -> Iterator[None]:
    """While the block runs, values of a stranger's configuration may be of any kind."""
    try:
        yield
    except PaxError:
        raise
    except (
        TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError,
        MemoryError,
    ) as error:  # fmt: skip
        raise InvalidArgumentError(
            "A configuration has a value of another kind than its key asks for.",
            where=where,
            got=f"{type(error).__name__}: {error}"[:200],
            write="the configuration as it was written with the weights",
        ) from error


class Fields:
    """Keys and values of a configuration, with errors that name what is missing.

    Args:
        values: the keys and values.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """A value; the default if there is none, or null."""
        value = self.values.get(name)
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise self._too_large(name, value)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """A value that must be there."""
        value = self.get(name)
        if value is None:
            raise InvalidArgumentError(
                "A configuration lacks a value that the net needs.",
                where=self.where,
                got=f"no {name!r} among {a_few(sorted(map(str, self.values)), 8)}",
                write=f"the whole configuration, with {name!r}",
            )
        return value

    def layers(self, name: str) -> int:
        """How many layers there are."""
        count = integer(self.need(name), f"{self.where}: {name}", least=1)
        if count > _MOST_LAYERS:
            raise self._too_large(name, count)
        return count

    def _too_large(self, name: str, value: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            "A configuration has a size that no net has.",
            where=f"{self.where}: {name}",
            got=f"{value:.3g}" if abs(value) < 1e300 else "a number of many digits",
            write="the configuration as it was written with the weights",
        )


Found = dict[str, Any]  # fields of a DecoderConfig


def fields_of_hf(config: Mapping[str, Any]) -> Found:
    """See `DecoderConfig.from_hf`."""
    fields = Fields(config, "config.json")
    family = fields.get("model_type", "none")
    if family == "gemma3" and "text_config" in config:
        # A model of text and images: the language model is a part of it.
        fields, family = Fields(config["text_config"], "config.json: text_config"), "gemma3_text"
    if family not in _FAMILIES:
        raise unknown_family(family, "config.json: model_type", sorted(_FAMILIES))
    return _FAMILIES[family](fields)


def unknown_family(family: Any, where: str, known: list[str]) -> InvalidArgumentError:
    """The error about a model of another architecture."""
    return InvalidArgumentError(
        "A Decoder is no net of this architecture.",
        where=where,
        got=repr(family),
        write=f"a model of {', '.join(known)}; or a DecoderConfig by hand, if it is alike",
    )


def _llama(fields: Fields) -> Found:
    return _common(fields, "llama")


def _mistral(fields: Fields) -> Found:
    window = fields.get("sliding_window")
    return _common(fields, "mistral") | {"kinds": (LayerKind(window=window),)}


def _qwen2(fields: Fields) -> Found:
    found = _common(fields, "qwen2") | {"kinds": _kinds_of_qwen(fields)}
    return found | {"projection_bias": True, "output_bias": False}


def _qwen3(fields: Fields) -> Found:
    found = _common(fields, "qwen3") | {"kinds": _kinds_of_qwen(fields)}
    return found | {"query_key_norm": True}


def _kinds_of_qwen(fields: Fields) -> tuple[LayerKind, ...]:
    layers = fields.layers("num_hidden_layers")
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    first = fields.get("max_window_layers", layers)
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
    local = LayerKind(window=fields.get("sliding_window", 4096))
    own = {
        "kinds": _kinds(fields, default, local, LayerKind()),
        "post_norms": True,
        "attention_softcap": fields.get("attn_logit_softcapping"),
        "logit_softcap": fields.get("final_logit_softcapping"),
        "attention_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
    }
    return _common(fields, "gemma2") | _of_gemma(fields) | own


def _gemma3(fields: Fields) -> Found:
    layers = fields.layers("num_hidden_layers")
    period = fields.get("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    ropes = fields.get("rope_parameters", {})
    local_base = ropes.get("sliding_attention", {}).get("rope_theta")
    if local_base is None:
        local_base = fields.get("rope_local_base_freq", 10000.0)
    local = LayerKind(fields.get("sliding_window", 4096), float(local_base), scaled=False)
    own = {
        "kinds": _kinds(fields, default, local, LayerKind()),
        "post_norms": True,
        "query_key_norm": True,
        "attention_softcap": fields.get("attn_logit_softcapping"),
        "logit_softcap": fields.get("final_logit_softcapping"),
        "attention_scale": fields.get("query_pre_attn_scalar", 256) ** -0.5,
    }
    base = {"rotary_base": _rope(fields, 1_000_000.0)[0]}
    return _common(fields, "gemma3") | _of_gemma(fields) | own | base


def _of_gemma(fields: Fields) -> dict[str, Any]:
    word = fields.get("hidden_activation", "gelu_pytorch_tanh")
    return {
        "activation": _activation(word),
        "norm_offset": 1.0,
        "embed_scale": float(fields.need("hidden_size")) ** 0.5,
        "tied": bool(fields.get("tie_word_embeddings", True)),
    }


def _gpt2(fields: Fields) -> Found:
    dim, heads = fields.need("n_embd"), fields.need("n_head")
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if fields.get(name, usual) != usual:
            raise unsupported(fields, name)
    return {
        "family": "gpt2",
        "vocab_size": fields.need("vocab_size"),
        "dim": dim,
        "num_layers": fields.layers("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_size": dim // heads,
        "hidden_dim": fields.get("n_inner", 4 * dim),
        "max_positions": fields.get("n_positions", 1024),
        "norm": "layer",
        "norm_eps": fields.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(fields.get("activation_function", "gelu_new")),
        "gated": False,
        "projection_bias": True,
        "output_bias": True,
        "dense_bias": True,
        "positions": "learned",
        "tied": bool(fields.get("tie_word_embeddings", True)),
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
    dim, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    bias = bool(fields.get("attention_bias", False))
    base, scaling = _rope(fields, 10000.0)
    head_size = fields.get("head_dim", dim // heads)
    turned = fields.get("partial_rotary_factor", 1.0)
    return {
        "family": family,
        "vocab_size": fields.need("vocab_size"),
        "dim": dim,
        "num_layers": fields.layers("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.get("num_key_value_heads", heads),
        "head_size": head_size,
        "hidden_dim": fields.need("intermediate_size"),
        "max_positions": fields.get("max_position_embeddings", 2048),
        "norm_eps": fields.get("rms_norm_eps", 1e-6),
        "activation": _activation(fields.get("hidden_act", "silu")),
        "projection_bias": bias,
        "output_bias": bias,
        "dense_bias": bool(fields.get("mlp_bias", False)),
        "rotary_base": base,
        "rotary_size": None if turned == 1.0 else int(head_size * turned),
        "rotary_scaling": scaling,
        "tied": bool(fields.get("tie_word_embeddings", False)),
    }


def _rope(fields: Fields, default: float) -> tuple[float, RotaryScaling | None]:
    """The base of the rotary embedding, and how it is scaled; in the old form and the new."""
    rope = fields.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    base = rope.get("rope_theta") or fields.get("rope_theta", default)
    scaling = dict(rope) or dict(fields.get("rope_scaling", {}))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(base), None
    if kind not in ("linear", "llama3", "yarn", "dynamic"):
        raise unsupported(fields, "rope_scaling", kind)
    length = scaling.get("original_max_position_embeddings")
    length = fields.get("max_position_embeddings") if length is None else length
    names = (
        ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    )
    low, high = (1.0, 32.0) if kind == "yarn" else (1.0, 4.0)
    return float(base), RotaryScaling(
        kind,
        float(scaling.get("factor", 1.0)),
        None if kind == "linear" else length,
        float(scaling.get(names[0]) or low),
        float(scaling.get(names[1]) or high),
        scaling.get("attention_factor"),
    )


def _kinds(
    fields: Fields, default: list[str], local: LayerKind, whole: LayerKind
) -> tuple[LayerKind, ...]:
    of_word = {"sliding_attention": local, "full_attention": whole}
    words = fields.get("layer_types", default)
    for word in words:
        if word not in of_word:
            raise unsupported(fields, "layer_types", word)
    return repeating([of_word[word] for word in words])


def _activation(word: str) -> str:
    if word not in _ACTIVATIONS:
        raise InvalidArgumentError(
            "A Decoder has no such activation.",
            where="config.json: hidden_act",
            got=repr(word),
            write=" or ".join(map(repr, sorted(_ACTIVATIONS))),
        )
    return _ACTIVATIONS[word]


def unsupported(fields: Fields, name: str, value: Any = None) -> InvalidArgumentError:
    """The error about a choice that a Decoder does not have."""
    return InvalidArgumentError(
        "This configuration chooses what a Decoder cannot do.",
        where=f"{fields.where}: {name}",
        got=repr(fields.get(name) if value is None else value),
        write="a model without it",
    )
