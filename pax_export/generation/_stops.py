"""Stop conditions: tokens, sequences of tokens, or strings."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._jax import is_tracer
from pax_export._types import PyTree

#: What a caller may give.
Stop = int | str | Iterable[int | str | Iterable[int]] | None


class Stops(NamedTuple):
    """What ends a text, sorted: equal sets are equal static data."""

    ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()  # of two tokens and more
    strings: tuple[str, ...] = ()


def checked_stops(stop: Any, where: str) -> Stops:
    """What ends a text, by kinds."""
    if isinstance(stop, (np.ndarray, jax.Array)) and not is_tracer(stop):
        stop = np.asarray(stop).tolist()
    alone = isinstance(stop, str) or not isinstance(stop, Iterable)
    given: list[Any] = [stop] if alone else list(stop)
    ids, sequences, strings = set(), set(), set()
    for each in given:
        if isinstance(each, str) and each:
            strings.add(each)
        elif _is_id(each):
            ids.add(int(each))
        elif isinstance(each, (list, tuple, np.ndarray)) and len(each) and all(map(_is_id, each)):
            found = tuple([int(token) for token in each])
            ids.update(found) if len(found) == 1 else sequences.add(found)
        else:
            raise InvalidArgumentTypeError(
                "A text ends at tokens, which are told by their ids, or at strings.",
                where=f"{where}: stop",
                got=repr(each),
                write="stop=tokenizer.token_to_id(...), several ids, sequences of ids as in "
                "stop=[2, [13, 13]], or strings beside tokenizer=",
            )
    return Stops(tuple(sorted(ids)), tuple(sorted(sequences)), tuple(sorted(strings)))


def _is_id(value: PyTree) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def checked_stop(stop: Any, where: str) -> tuple[int, ...]:
    """The ids of tokens that end a text, where nothing else can."""
    stops = checked_stops(stop, where)
    if stops.sequences or stops.strings:
        raise InvalidArgumentError(
            "A text ends at single tokens here.",
            where=f"{where}: stop",
            got=repr([*stops.sequences, *stops.strings][0]),
            write="ids of tokens; or pax.generate, which takes sequences and strings",
        )
    return stops.ids


class StringEnds:
    """Which rows have come to a string that ends them; it is told each token of all rows.

    Args:
        strings: that end a text.
        tokenizer: with ``decode(ids, skip_special_tokens=False)``.
        rows: how many there are.
        where: the function that was given it.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Any, rows: int, where: str):
        if not callable(getattr(tokenizer, "decode", None)):
            raise InvalidArgumentTypeError(
                "A string ends a text, and there is no tokenizer that makes text of tokens.",
                where=f"{where}: tokenizer",
                got=type(tokenizer).__name__,
                write="tokenizer=..., of tokenizers or transformers; or stop= with ids of tokens",
            )
        self._strings, self._tokenizer, self._where = strings, tokenizer, where
        self._rows: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, tokens: Any, alive: Any) -> np.ndarray:
        """Whether each row ends with its new token.

        Args:
            tokens: ``[batch]``.
            alive: ``[batch]``, whether they are of the texts.
        """
        if is_tracer(tokens):
            raise InvalidArgumentTypeError(
                "Strings are looked for outside of compiled functions.",
                where=f"{self._where}: stop",
                got=repr(self._strings[0]),
                write="stop= with sequences of ids; or call it outside of jax.jit",
            )
        ends = np.zeros(len(self._rows), bool)
        for row, (token, is_alive) in enumerate(zip(np.asarray(tokens), np.asarray(alive))):
            if is_alive:
                self._rows[row].append(int(token))
                text = self._tokenizer.decode(self._rows[row], skip_special_tokens=False)
                ends[row] = any(each in text for each in self._strings)
        return ends
