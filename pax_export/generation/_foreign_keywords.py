"""Keywords of transformers' `generate`, and the equivalents here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from pax_export._foundations.errors import InvalidArgumentTypeError, near_names

_SEARCH = "pax.generation.beam_search(lm, tokens, max_new_tokens=..., beams=4)"
_SPECULATE = "pax.generation.speculate(lm, draft, tokens, max_new_tokens=...)"
_SAMPLERS = "of pax.generation.samplers"
_RULE = f"sampler=...: a rule of your own derives from Sampler, {_SAMPLERS}, and changes logits"
_DRAWN = f"sampler=temperature(0.8) | top_p(0.9), {_SAMPLERS}, and key=jax.random.key(0)"
_MASK = "mask=...: [batch, length], 1 at the tokens that are meant, on whichever side padding is"
_WHILE = "pax.generate.stream(lm, tokens, ...), which gives token by token, and stop when you like"
_CACHE = "max_length=..., the room of the cache, and cache_dtype="
_LOG_PROBS = "log_probs=True, which gives those of the tokens; lm(tokens) gives all logits"
_CAPTURE = "pax.debug.capture(lm, ...), which gives what chosen modules return"
_STOP = "stop=...: ids, sequences of ids, or strings with tokenizer="
_BANNED = f"sampler=...: a rule that sets logits to -inf, derived from Sampler, {_SAMPLERS}"
_NOWHERE = "nothing: leave it out"

KEYWORDS = {
    # The required argument.
    "max_new_tokens": "max_new_tokens=64, how many tokens to choose at most; max_length= is the "
    "room of the cache",
    # The prompt.
    "inputs": "tokens, the second argument",
    "input_ids": "tokens, the second argument",
    "attention_mask": _MASK,
    "position_ids": _MASK,
    "inputs_embeds": "tokens, the second argument; vectors are not taken",
    "past_key_values": "cache=..., which generate(..., return_cache=True) and prefill give",
    "negative_prompt_ids": _RULE,
    "negative_prompt_attention_mask": _RULE,
    # How a token is chosen.
    "do_sample": f"{_DRAWN}; without them the likeliest token is taken",
    "temperature": _DRAWN,
    "top_k": _DRAWN.replace("top_p(0.9)", "top_k(40)"),
    "top_p": _DRAWN,
    "min_p": _DRAWN.replace("top_p(0.9)", "min_p(0.05)"),
    "repetition_penalty": f"sampler=repetition_penalty(1.1) | greedy(), {_SAMPLERS}",
    "seed": "key=jax.random.key(seed)",
    "generator": "key=jax.random.key(0)",
    "generation_config": "the arguments themselves; Decoder.from_pretrained reads "
    "generation_config.json",
    **dict.fromkeys(
        (
            "logits_processor", "prefix_allowed_tokens_fn", "typical_p", "no_repeat_ngram_size",
            "guidance_scale", "sequence_bias", "constraints", "force_words_ids",
        ),
        _RULE,
    ),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), _BANNED),
    # Where a text ends.
    "eos_token_id": _STOP,
    "stop_strings": _STOP,
    "stop_token_ids": _STOP,
    "pad_token_id": "pad=...",
    "bos_token_id": "tokens that begin with it",
    "decoder_start_token_id": "tokens that begin with it",
    "max_tokens": "max_new_tokens=...",
    "min_length": _BANNED,
    "min_new_tokens": _BANNED,
    "stopping_criteria": _WHILE,
    "max_time": _WHILE,
    "streamer": _WHILE,
    # Several texts, and searches.
    **dict.fromkeys(("num_beams", "beams", "length_penalty", "early_stopping", "num_beam_groups",
                     "diversity_penalty", "low_memory"), _SEARCH),
    "num_return_sequences": f"tokens with each row repeated, and key=; or {_SEARCH}",
    **dict.fromkeys(
        (
            "assistant_model", "assistant_tokenizer", "num_assistant_tokens",
            "prompt_lookup_num_tokens",
        ),
        _SPECULATE,
    ),
    # Return values.
    "output_scores": _LOG_PROBS,
    "output_logits": _LOG_PROBS,
    "output_attentions": _CAPTURE,
    "output_hidden_states": _CAPTURE,
    "return_dict_in_generate": "return_cache=True or log_probs=True, which give a Generated",
    # Programs and memory.
    "use_cache": f"{_NOWHERE}: there always is one; return_cache=True gives it",
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len"), _CACHE),
    "prefill_chunk_size": "prefill_chunk=...",
    "device": "jax.device_put(lm, device), and generate computes there",
}  # fmt: skip

_IDS = "nothing: it returns a list of ids, and generate takes lists of any lengths"
#: Keywords of transformers' `apply_chat_template`, which are no variables of a template.
TEMPLATE_KEYWORDS = {
    "conversation": "messages, the first argument",
    "chat_template": "Tokenizer(tokenizer, special_tokens, chat_template=...)",
    "continue_final_message": "tokenize=False, the text without its end, and "
    "encode(text, add_special_tokens=False)",
    "return_assistant_tokens_mask": "nothing: leave it out",
    "tokenizer_kwargs": "nothing: leave it out",
    **dict.fromkeys(("return_tensors", "return_dict", "padding", "truncation", "max_length"), _IDS),
}


P = ParamSpec("P")
R = TypeVar("R")


def explain_keywords(table: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that rejects unknown keywords and suggests what to write.

    Args:
        table: keyword of other libraries -> what to write.

    Example:
        >>> @explain_keywords({"dim": "axis=..., as numpy calls it"})
        ... def total(x, axis=0):
        ...     return x
        >>> try:
        ...     total([1], dim=0)
        ... except TypeError as error:
        ...     print(error)
        total has no argument `dim`.
          where: total
          got: dim=0
          fix: axis=..., as numpy calls it
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        names = [name for name in known if name != "cls"]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise _unknown_keyword(function, names, name, kwargs[name], table)
            return function(*args, **kwargs)

        return call

    return decorate


def _unknown_keyword(
    function: Callable, names: list[str], name: str, value: object, table: Mapping[str, str]
) -> InvalidArgumentTypeError:
    near = near_names(name, names)
    meant = f"{near[0]}=..." if near else f"one of {', '.join(names)}"
    return InvalidArgumentTypeError(
        f"{function.__name__} has no argument `{name}`.",
        where=function.__qualname__,
        got=f"{name}={value!r:.80}",
        write=table.get(name, meant),
    )
