"""Stops of generation, and the defaults of a net."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax
import numpy as np

from pax_export._foundations.errors import InvalidArgumentTypeError
from pax_export._foundations.jax import is_tracer
from pax_export._foundations.types import Array, PRNGKey
from pax_export.generation._prompt import LanguageModel
from pax_export.generation.samplers import (
    Sampler,
    greedy,
    min_p,
    repetition_penalty,
    temperature,
    top_k,
    top_p,
)
from pax_export.nets import GenerationDefaults

#: Types that a caller may pass.
Stop = int | str | Iterable[int | str | Iterable[int]] | None


class Decodes(Protocol):
    """What makes text of tokens: a tokenizer of ours, of tokenizers or of transformers."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> Any: ...


class Stops(NamedTuple):
    """Stop conditions, sorted, so that equal sets are equal static data."""

    ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()  # of two tokens and more
    strings: tuple[str, ...] = ()


def checked_stops(stop: Stop, where: str) -> Stops:
    """Returns the stop conditions by type."""
    if isinstance(stop, (np.ndarray, jax.Array)) and not is_tracer(stop):
        stop = np.asarray(stop).tolist()
    alone = isinstance(stop, str) or not isinstance(stop, Iterable)
    stops: list[Any] = [stop] if alone else list(stop)  # type: ignore[arg-type]
    ids, sequences, strings = set(), set(), set()
    for each in stops:
        if isinstance(each, str) and each:
            strings.add(each)
        elif _is_id(each):
            ids.add(int(each))
        elif isinstance(each, (list, tuple, np.ndarray)) and len(each) and all(map(_is_id, each)):
            found = tuple([int(token) for token in each])
            ids.update(found) if len(found) == 1 else sequences.add(found)
        else:
            raise InvalidArgumentTypeError(
                "stop takes ids of tokens, sequences of ids, and strings.",
                where=f"{where}: stop",
                got=repr(each),
                write="stop=tokenizer.token_to_id(...), several ids, sequences of ids as in "
                "stop=[2, [13, 13]], or strings with tokenizer=",
            )
    return Stops(tuple(sorted(ids)), tuple(sorted(sequences)), tuple(sorted(strings)))


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class StringMatcher:
    """Checks whether tokens contain a string; equal matchers are equal static data."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Decodes | None, where: str):
        if not callable(getattr(tokenizer, "decode", None)):
            raise InvalidArgumentTypeError(
                "Strings in stop= need a tokenizer, which makes text of tokens.",
                where=f"{where}: tokenizer",
                got=type(tokenizer).__name__,
                write="tokenizer=..., of tokenizers or transformers; or stop= with ids of tokens",
            )
        self.strings = strings
        self._tokenizer: Any = tokenizer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringMatcher):
            return NotImplemented
        return self.strings == other.strings and self._tokenizer is other._tokenizer

    def __hash__(self) -> int:
        return hash((self.strings, id(self._tokenizer)))

    def matches(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(each in text for each in self.strings)

    def of_texts(self, texts: Array, last: Array, alive: Array) -> np.ndarray:
        """``[...]``: which of the texts ``[..., length]`` match up to their token at ``last``."""
        texts, last, alive = map(np.asarray, (texts, last, alive))
        found = np.zeros(last.shape, bool)
        for index in np.argwhere(alive):
            row = tuple(index)
            tokens = texts[row][: last[row] + 1].tolist()
            found[row] = self.matches([token for token in tokens if token >= 0])
        return found


class TextEnds(NamedTuple):
    """`Stops` for a compiled program, which asks `strings` about tokens by a callback."""

    ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    strings: StringMatcher | None = None


def checked_text_ends(stop: Stop, tokenizer: Decodes | None, where: str) -> TextEnds:
    """Returns stop conditions to apply to a complete sequence."""
    ids, sequences, strings = checked_stops(stop, where)
    return TextEnds(ids, sequences, StringMatcher(strings, tokenizer, where) if strings else None)


class StringEnds:
    """Tracks which rows contain a stop string; called with each new token of all rows."""

    def __init__(self, matcher: StringMatcher, rows: int, where: str):
        self._matcher, self._where = matcher, where
        self._rows: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, tokens: Array, alive: Array) -> np.ndarray:
        """Whether each row ends with its new token."""
        if is_tracer(tokens):
            raise InvalidArgumentTypeError(
                "generate cannot look for strings in a compiled function.",
                where=f"{self._where}: stop",
                got=repr(self._matcher.strings[0]),
                write="stop= with sequences of ids; or call it outside of jax.jit",
            )
        ends = np.zeros(len(self._rows), bool)
        for row, (token, is_alive) in enumerate(zip(np.asarray(tokens), np.asarray(alive))):
            if is_alive:
                self._rows[row].append(int(token))
                ends[row] = self._matcher.matches(self._rows[row])
        return ends


# --- Generation defaults of a net ----------------------------------------------------------------


def _of_net(lm: LanguageModel) -> GenerationDefaults:
    found = getattr(getattr(lm, "config", None), "generation", None)
    return found if isinstance(found, GenerationDefaults) else GenerationDefaults()


def default_stop(stop: Stop, lm: LanguageModel) -> Stop:
    """Returns the stop condition; by default that of the net's generation config."""
    return _of_net(lm).stop if stop is None else stop


def default_pad(pad: int | None, lm: LanguageModel) -> int:
    """Returns the pad id; by default that of the net's generation config, or 0."""
    return (_of_net(lm).pad or 0) if pad is None else pad


def default_sampler(
    sampler: Sampler | None, lm: LanguageModel, key: PRNGKey | None = None
) -> Sampler:
    """Returns the sampler; by default that of the net's generation config."""
    if sampler is not None:
        return sampler
    defaults = _of_net(lm)
    rules: list[Sampler] = []
    if defaults.repetition_penalty != 1:
        rules.append(repetition_penalty(defaults.repetition_penalty))
    if defaults.do_sample and key is not None:
        rules.append(temperature(defaults.temperature))
        rules += [top_k(defaults.top_k)] if defaults.top_k else []
        rules += [top_p(defaults.top_p)] if defaults.top_p < 1 else []
        rules += [min_p(defaults.min_p)] if defaults.min_p else []
    else:
        rules.append(greedy())
    return reduce(operator.or_, rules)
