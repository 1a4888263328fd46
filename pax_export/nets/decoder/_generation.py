"""GenerationDefaults: sampling and stop settings of a language model, read and written."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pax_export._foundations.errors import PaxWarning, a_few
from pax_export.nets.decoder._fields import Fields, Keys, short_repr

#: Keys read from generation_config.json, with transformers' defaults.
_READ = {
    "eos_token_id": None,
    "pad_token_id": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
#: Keys that do not change the tokens, or are arguments here.
_WITHOUT_EFFECT = frozenset(
    """bos_token_id decoder_start_token_id max_length max_new_tokens max_time use_cache
    cache_implementation cache_config max_cache_len prefill_chunk_size transformers_version
    _from_model_config output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate num_return_sequences remove_invalid_values renormalize_logits
    length_penalty early_stopping low_memory compile_config disable_compile
    continuous_batching_config is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight prompt_lookup_num_tokens max_matching_ngram_size chat_format
    speculation_type use_mtp token_healing""".split()
)

#: Those of config.json, which are read where there is no generation_config.json.
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


@dataclass(frozen=True)
class GenerationDefaults:
    """Default arguments of `generate`; static, and not used by the net.

    `Decoder.from_pretrained` reads it from ``generation_config.json``.

    Attributes:
        stop: the ids of end-of-text tokens.
        pad: the id of padding after the end; None for 0.
        do_sample: whether to sample tokens if a key is given.
        temperature: the temperature of the sampler.
        top_k: the number of tokens to sample from; 0 for all.
        top_p: the total probability of the tokens to sample from.
        min_p: the minimum probability relative to that of the likeliest token.
        repetition_penalty: the repetition penalty, also of greedy decoding; 1 for none.

    Example:
        >>> import dataclasses, pax_export as pax
        >>> config = pax.nets.DecoderConfig.llama(
        ...     vocab_size=100, dim=16, num_layers=2, num_heads=4, hidden_dim=32)
        >>> ends = pax.nets.GenerationDefaults(stop=(2,))
        >>> dataclasses.replace(config, generation=ends).generation.stop
        (2,)
    """

    stop: tuple[int, ...] = ()
    pad: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(values: Mapping[str, Any], where: str, size: int) -> GenerationDefaults:
    """Parses a ``generation_config.json``; end tokens outside the vocabulary are dropped."""
    fields = Fields({k: v for k, v in values.items() if k in _READ}, where, Keys(_READ))
    strange = {k: v for k, v in values.items() if k not in _READ and k not in _WITHOUT_EFFECT}
    changing = [f"{k}: {short_repr(v)}" for k, v in strange.items() if not _is_neutral(v)]
    if changing:
        warning = PaxWarning(
            "Keys that change the tokens of transformers have no effect here.",
            where=where,
            got=a_few(changing, 6),
            write="sampler=, with a rule derived from samplers.Sampler; or beam_search",
        )
        warnings.warn(warning, stacklevel=5)
    top_k = fields.get("top_k")
    return GenerationDefaults(
        stop=tuple(sorted({i for i in _read_ids(fields, "eos_token_id") if 0 <= i < size})),
        pad=next((i for i in _read_ids(fields, "pad_token_id") if 0 <= i < size), None),
        do_sample=fields.flag("do_sample"),
        temperature=fields.number("temperature", zero=True),
        top_k=fields.size("top_k") if top_k else 0,
        top_p=_probability(fields, "top_p"),
        min_p=_probability(fields, "min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
    )


def _probability(fields: Fields, name: str) -> float:
    value = fields.number(name, zero=True)
    if value > 1:
        raise fields.wrong(name, "a probability, of 1 at most")
    return value


def _read_ids(fields: Fields, name: str) -> list[int]:
    value = fields.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        return ids
    raise fields.wrong(name, "the id of a token, or a list of them")


def _is_neutral(value: object) -> bool:
    """Whether the value of a generation key has no effect."""
    return value is None or (isinstance(value, (bool, int, float)) and value in (0, 1)) or (
        isinstance(value, (str, list, dict)) and not value
    )  # fmt: skip


def generation_config(defaults: GenerationDefaults, bos: int | None) -> Mapping[str, Any]:
    """The content of ``generation_config.json``."""
    fields: dict[str, Any] = {"bos_token_id": bos, "pad_token_id": defaults.pad}
    fields["eos_token_id"] = list(defaults.stop) if len(defaults.stop) != 1 else defaults.stop[0]
    if defaults.repetition_penalty != 1:
        fields["repetition_penalty"] = defaults.repetition_penalty
    if defaults.do_sample:
        fields |= {"do_sample": True, "temperature": defaults.temperature, "top_k": defaults.top_k}
        fields["top_p"] = defaults.top_p
        fields |= {"min_p": defaults.min_p} if defaults.min_p else {}
    return {name: value for name, value in fields.items() if value not in (None, [])}
