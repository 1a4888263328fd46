"""Texts that end at sequences of tokens and at strings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import beam_search, speculate
from tests.closeness import assert_close
from tests.generation.nets import TinyLM, alone, prompts
from tests.refusals import refused

LM = TinyLM()
ROWS = prompts(7, 3, 5)
FREE = [alone(LM, row, 8) for row in ROWS]


class Letters:
    """Token 1 is a, token 2 is b, and so on; the even ones are written twice."""

    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return "".join([chr(96 + i) * (2 - i % 2) for i in ids])


class Ids:
    """Each token is its number between brackets, so strings are sequences of tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join([f"<{each}>" for each in ids])


def cut(text, lasts, pad=-1):
    """A text up to the end of the first of some sequences."""
    for end in range(1, len(text) + 1):
        if any(text[:end][-len(each) :] == list(each) for each in lasts):
            return text[:end] + [pad] * (len(text) - end)
    return text


def test_a_sequence_of_tokens_ends_a_text():
    stop = [FREE[0][3:6], [FREE[1][2]], FREE[2][1]]
    expected = [cut(text, [*stop[:2], stop[2:]]) for text in FREE]
    assert expected != FREE
    made = pax.generate(LM, ROWS, max_new_tokens=8, stop=stop, pad=-1, log_probs=True)
    assert made.tokens.tolist() == expected
    assert made.lengths.tolist() == [8 - row.count(-1) for row in expected]
    columns = list(pax.generate.stream(LM, ROWS, max_new_tokens=8, stop=stop, pad=-1))
    assert np.stack(columns, 1).tolist() == [row[: len(columns)] for row in expected]
    compiled = jax.jit(lambda tokens: pax.generate(LM, tokens, max_new_tokens=8, stop=stop, pad=-1))
    assert compiled(jnp.array([ROWS[0]])).tolist() == expected[:1]


def test_a_sequence_begins_among_the_new_tokens():
    stop = [[ROWS[0][-1], FREE[0][0]]]
    assert pax.generate(LM, ROWS[:1], max_new_tokens=8, stop=stop).tolist() == FREE[:1]


def test_a_string_ends_a_text():
    first, second = Letters().decode(FREE[0][2:4], False), Letters().decode(FREE[1][:1], False)
    stop = [first, second[0], 22, FREE[2][3:5]]
    options = {"max_new_tokens": 8, "stop": stop, "pad": -1, "tokenizer": Letters()}
    made = pax.generate(LM, ROWS, log_probs=True, return_cache=True, max_length=30, **options)
    texts = [Letters().decode([i for i in row if i >= 0], False) for row in made.tokens.tolist()]
    assert first in texts[0] or second[0] in texts[0]
    for row, free in zip(made.tokens.tolist(), FREE):
        kept = [i for i in row if i >= 0]
        assert kept == free[: len(kept)]
        before = Letters().decode(kept[:-1], False)
        assert first not in before and second[0] not in before
    assert made.lengths.tolist() == [8 - row.count(-1) for row in made.tokens.tolist()]
    assert made.lengths[1] == 1
    assert made.cache.lengths.tolist() == [len(row) + int(n) for row, n in zip(ROWS, made.lengths)]
    columns = list(pax.generate.stream(LM, ROWS, **options))
    assert np.stack(columns, 1).tolist() == made.tokens[:, : len(columns)].tolist()
    plain = pax.generate(LM, ROWS, max_new_tokens=8, log_probs=True)
    inside = np.arange(8) < np.asarray(made.lengths)[:, None]
    assert_close(made.log_probs, np.where(inside, plain.log_probs, 0), rtol=1e-5)


@pytest.mark.parametrize(("seed", "compiled"), [(0, False), (5, True)])
def test_speculation_ends_where_generate_does(seed, compiled):
    strings = [Letters().decode(FREE[0][2:4], False), Letters().decode(FREE[1][:1], False)]
    draft, stop = TinyLM(seed=seed), [*strings, FREE[2][3:5], FREE[2][7]]
    options = {"max_new_tokens": 8, "stop": stop, "pad": -1, "tokenizer": Letters()}
    expected = pax.generate(LM, ROWS[:1] * 2 if compiled else ROWS, **options).tolist()
    search = lambda rows: speculate(LM, draft, rows, ahead=3, **options)  # noqa: E731
    made = jax.jit(search)(jnp.array(ROWS[:1] * 2)) if compiled else search(ROWS)
    assert made.tolist() == expected and expected != FREE


def test_beams_end_at_sequences_and_strings():
    options = {"max_new_tokens": 6, "pad": -1}
    one = {**options, "stop": [FREE[0][2:4], FREE[1][:2]]}
    greedy = pax.generate(LM, ROWS, **one).tolist()
    assert beam_search(LM, ROWS, beams=1, **one).tokens[:, 0].tolist() == greedy
    sequences = [FREE[0][1:3], FREE[1][:2], FREE[2][2:5]]
    strings = [Ids().decode(each, False) for each in sequences]
    by_tokens = beam_search(LM, ROWS, beams=4, stop=sequences, **options)
    by_texts = beam_search(LM, ROWS, beams=4, stop=strings, tokenizer=Ids(), **options)
    assert by_tokens.tokens.tolist() == by_texts.tokens.tolist()


def test_where_strings_and_sequences_cannot_be():
    options = {"max_new_tokens": 2, "tokenizer": Letters(), "stop": "ab"}
    with pytest.raises(pax.errors.InvalidArgumentTypeError):
        jax.jit(lambda tokens: pax.generate(LM, tokens, **options))(jnp.array(ROWS[:1]))
    with pytest.raises(pax.errors.InvalidArgumentTypeError):
        pax.generate(LM, ROWS, **{**options, "tokenizer": object()})
    for search in (beam_search, lambda lm, *args, **rest: speculate(lm, lm, *args, **rest)):
        with pytest.raises(pax.errors.InvalidArgumentTypeError) as caught:
            search(LM, ROWS, max_new_tokens=2, stop="ab")
        assert caught.value.where.endswith(": tokenizer") and caught.value.got == "NoneType"
    with refused(pax.errors.InvalidArgumentError, "not strings"):
        pax.generation.export(LM, "nowhere", max_length=9, stop="ab")
