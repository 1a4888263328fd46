"""Beam search, speculation and prompts that are read once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import beam_search, prefill, speculate
from tests.closeness import assert_close
from tests.generation.nets import (
    VOCABULARY,
    TinyCache,
    TinyLM,
    forward,
    logits_of,
    prompts,
)
from tests.generation.nets import alone as greedy_alone

LM = TinyLM()
ROWS = prompts(7, 3, 5, 1)


def test_one_beam_is_greedy():
    stop = greedy_alone(LM, ROWS[0], 6)[3]
    found = beam_search(LM, ROWS, max_new_tokens=6, beams=1, stop=stop, pad=-1)
    assert found.tokens[:, 0].tolist() == [greedy_alone(LM, row, 6, [stop], pad=-1) for row in ROWS]


def scored(prompt, text):
    logits = logits_of(LM, [*prompt, *text])[len(prompt) - 1 : -1]
    return float(jax.nn.log_softmax(logits)[jnp.arange(len(text)), jnp.array(text)].sum())


def test_as_many_beams_as_there_are_tokens_find_the_best_text():
    found = beam_search(LM, ROWS[1:3], max_new_tokens=2, beams=VOCABULARY, length_penalty=0.0)
    for row, prompt in enumerate(ROWS[1:3]):
        pairs = np.array(list(itertools.product(range(VOCABULARY), repeat=2)))
        texts = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], axis=1)
        logits = jax.nn.log_softmax(forward(LM.eval(), jnp.array(texts))[:, len(prompt) - 1 : -1])
        totals = np.take_along_axis(np.asarray(logits), pairs[:, :, None], 2).sum((1, 2))
        assert found.tokens[row, 0].tolist() == pairs[totals.argmax()].tolist()
        assert_close(found.scores[row, 0], totals.max(), rtol=1e-5)
        assert (np.diff(found.scores[row]) <= 0).all()


def test_beams_are_scored_with_their_lengths():
    stop = tuple(range(0, VOCABULARY, 3))
    found = beam_search(LM, ROWS, max_new_tokens=5, beams=4, stop=stop, length_penalty=0.7)
    assert len(np.unique(found.lengths)) > 1
    for row, prompt in enumerate(ROWS):
        for text, length, score in zip(*(x[row] for x in found)):
            made = text[: int(length)].tolist()
            assert_close(score, scored(prompt, made) / len(made) ** 0.7, rtol=1e-4)
            assert (text[int(length) :] == 0).all()
            assert not set(made[:-1]) & set(stop)
    alone = beam_search(LM, ROWS[1:2], max_new_tokens=5, beams=4, stop=stop, length_penalty=0.7)
    assert alone.tokens.tolist() == found.tokens[1:2].tolist()


@pytest.mark.parametrize("seed", [0, 5])  # the net itself, which is always right; another one
def test_speculation_gives_the_greedy_tokens(seed):
    free = [greedy_alone(LM, row, 9) for row in ROWS]
    stop = (free[0][4], free[2][0])
    expected = [greedy_alone(LM, row, 9, stop, pad=-1) for row in ROWS]
    draft = TinyLM(seed=seed)
    assert speculate(LM, draft, ROWS, max_new_tokens=9).tolist() == free
    made = speculate(LM, draft, ROWS, max_new_tokens=9, ahead=3, stop=stop, pad=-1)
    assert made.tolist() == expected
    assert speculate(LM, draft, ROWS, max_new_tokens=1).tolist() == [row[:1] for row in free]


def test_a_beginning_is_read_once_for_several_texts():
    logits, cache = prefill(LM, ROWS[:2], max_length=20, copies=2, prefill_chunk=4)
    assert logits.shape == (4, VOCABULARY)
    assert np.argmax(logits, -1)[::2].tolist() == [greedy_alone(LM, row, 1)[0] for row in ROWS[:2]]
    more = prompts(2, 1, 3, 1, seed=2)
    made = pax.generate(LM, more, cache=cache, max_new_tokens=3)
    beginnings = [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]
    assert made.tolist() == [greedy_alone(LM, a + b, 3) for a, b in zip(beginnings, more)]


def refused(run):
    with pytest.raises(pax.errors.PaxError) as raised:
        run()
    return str(raised.value)


def test_what_cannot_be_searched_is_named():
    text = refused(lambda: beam_search(LM, ROWS, max_new_tokens=2, beams=99))
    assert "There are fewer tokens than beams" in text
    assert "beams=23 or fewer" in text
    assert "beams is 1 or more" in refused(lambda: beam_search(LM, ROWS, max_new_tokens=2, beams=0))
    assert "none of the vocabulary" in refused(
        lambda: beam_search(LM, ROWS, max_new_tokens=2, stop=-4)
    )


@pytest.mark.parametrize("value", [None, "long", [1]])
def test_a_penalty_is_a_number(value):
    text = refused(lambda: beam_search(LM, ROWS, max_new_tokens=2, length_penalty=value))
    assert "length_penalty is a number." in text
    assert f"got: {value!r}" in text


def test_a_prompt_that_has_no_room_is_named():
    assert "max_length is an integer" in refused(lambda: prefill(LM, ROWS))
    text = refused(lambda: prefill(LM, ROWS, max_length=6))
    assert "The cache has no room" in text
    assert "row 0" in text


def test_a_cache_that_cannot_be_cut_is_named():
    class Rigid(TinyLM):
        def init_cache(self, batch, max_length, dtype=None):
            cache = super().init_cache(batch, max_length, dtype)
            return cache.keys, cache.values, cache.lengths

        def __call__(self, tokens, cache=None, lengths=None):
            logits, cache = super().__call__(tokens, TinyCache(*cache), lengths)
            return logits, (cache.keys, cache.values, cache.lengths)

    text = refused(lambda: speculate(Rigid(), LM, ROWS, max_new_tokens=2))
    assert "This cache cannot be cut" in text
    assert "with_lengths(lengths)" in text
    # For all else a cache may be any pytree.
    free = [greedy_alone(LM, row, 4) for row in ROWS]
    assert pax.generate(Rigid(), ROWS, max_new_tokens=4).tolist() == free
    assert beam_search(Rigid(), ROWS, max_new_tokens=4, beams=1).tokens[:, 0].tolist() == free
