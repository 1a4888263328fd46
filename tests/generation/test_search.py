"""Beam search, speculation and prompts that are read once."""

from __future__ import annotations

import dataclasses
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
    write_llama,
)
from tests.generation.nets import alone as greedy_alone
from tests.refusals import refused

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


# What `generate(num_beams=3, num_return_sequences=3, eos_token_id=[8, 10])` of transformers 5.23
# gives for the files of `write_llama`, by early_stopping and length_penalty.
RECORDED = {
    (False, 1.0): (
        [[[6, 8], [2, 8], [8]], [[10], [9, 6, 6, 6, 6], [9, 6, 6, 6, 22]]],
        [[-2.43005, -2.5191, -2.52063], [-2.09109, -2.25306, -2.27515]],
    ),
    (True, 0.0): (
        [[[8], [6, 8], [2, 8]], [[10], [9, 10], [9, 6, 6, 6, 6]]],
        [[-2.52063, -4.86011, -5.0382], [-2.09109, -4.59583, -11.26528]],
    ),
    ("never", 2.0): (
        [
            [[6, 6, 6, 6, 8], [6, 6, 6, 6, 6], [6, 4, 5, 6, 8]],
            [[9, 6, 6, 6, 6], [9, 6, 6, 6, 22], [9, 6, 6, 6, 13]],
        ],
        [[-0.49211, -0.49888, -0.50309], [-0.45061, -0.45503, -0.45618]],
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return pax.nets.Decoder.from_pretrained(write_llama(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize(("early_stopping", "length_penalty"), RECORDED)
def test_all_beams_are_those_of_transformers(llama, early_stopping, length_penalty):
    texts, scores = RECORDED[early_stopping, length_penalty]
    rules = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    rows = [[3, 1, 4, 1, 5], [9, 2]]
    found = beam_search(llama, rows, max_new_tokens=5, beams=3, stop=[8, 10], pad=-1, **rules)
    padded = [[text + [-1] * (5 - len(text)) for text in row] for row in texts]
    assert found.tokens.tolist() == padded
    assert found.lengths.tolist() == [[len(text) for text in row] for row in texts]
    assert_close(found.scores, scores, rtol=1e-5)


def test_beams_end_where_every_token_is_a_stop():
    found = beam_search(LM, ROWS, max_new_tokens=5, beams=4, stop=range(VOCABULARY), pad=-1)
    assert found.lengths.tolist() == [[1] * 4] * 4
    assert found.tokens[:, 0, 0].tolist() == [greedy_alone(LM, row, 1)[0] for row in ROWS]
    assert (np.asarray(found.tokens)[:, :, 1:] == -1).all()
    many = beam_search(LM, ROWS, max_new_tokens=5, beams=4, stop=range(1, VOCABULARY))
    assert (np.asarray(many.scores) > -np.inf).all()


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


@pytest.mark.parametrize("size", [VOCABULARY - 4, VOCABULARY + 99])
def test_a_draft_may_have_another_vocabulary(llama, size):
    draft = pax.nets.Decoder(dataclasses.replace(llama.config, vocab_size=size, num_layers=1))
    expected = pax.generate(llama, ROWS, max_new_tokens=5).tolist()
    assert speculate(llama, draft, ROWS, max_new_tokens=5).tolist() == expected


def test_where_logits_are_nan_there_is_no_text():
    lm = LM.set_attribute("embed", LM.embed.at[5].set(np.nan))
    rows = [[5, 3], [3, 4]]
    found = beam_search(lm, rows, max_new_tokens=3, beams=2, stop=9)
    assert np.isnan(found.scores[0]).all() and (np.asarray(found.tokens[0]) == -1).all()
    assert found.lengths[0].tolist() == [0, 0]
    expected = pax.generate(lm, rows, max_new_tokens=12, pad=2)
    assert expected[0].tolist() == [-1] + [2] * 11
    assert speculate(lm, LM, rows, max_new_tokens=12, pad=2).tolist() == expected.tolist()


def test_a_beginning_is_read_once_for_several_texts():
    logits, cache = prefill(LM, ROWS[:2], max_length=20, copies=2, prefill_chunk=4)
    assert logits.shape == (4, VOCABULARY)
    assert np.argmax(logits, -1)[::2].tolist() == [greedy_alone(LM, row, 1)[0] for row in ROWS[:2]]
    more = prompts(2, 1, 3, 1, seed=2)
    made = pax.generate(LM, more, cache=cache, max_new_tokens=3)
    beginnings = [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]
    assert made.tolist() == [greedy_alone(LM, a + b, 3) for a, b in zip(beginnings, more)]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"beams": 99}, ["99", "beams=23 or fewer"]),
        ({"beams": 0}, ["beams", "0"]),
        ({"stop": -4}, ["stop", "-4"]),
        *[({"length_penalty": value}, ["length_penalty", f"got: {value} for 2 tokens"])
          for value in (np.nan, np.inf, -np.inf, 200.0, -200.0)],
        *[({"early_stopping": value}, ["early_stopping", '"never"'])
          for value in (None, "always", [True])],
    ],
)  # fmt: skip
def test_invalid_options_of_a_search_are_refused(options, names):
    with refused(pax.errors.PaxError, *names):
        beam_search(LM, ROWS, **{"max_new_tokens": 2, **options})


@pytest.mark.parametrize("value", [None, "long", [1], 1j])
def test_a_length_penalty_is_a_number(value):
    with pytest.raises((TypeError, ValueError), match="float"):
        beam_search(LM, ROWS, max_new_tokens=2, length_penalty=value)


def test_a_prompt_without_room_is_refused():
    with refused(pax.errors.PaxError, "max_length"):
        prefill(LM, ROWS)
    with refused(pax.errors.PaxError, "row 0"):
        prefill(LM, ROWS, max_length=6)


def test_a_cache_that_cannot_be_cut_is_named():
    class Rigid(TinyLM):
        def init_cache(self, batch, max_length, dtype=None):
            cache = super().init_cache(batch, max_length, dtype)
            return cache.keys, cache.values, cache.lengths

        def __call__(self, tokens, cache=None, lengths=None):
            logits, cache = super().__call__(tokens, TinyCache(*cache), lengths)
            return logits, (cache.keys, cache.values, cache.lengths)

    with refused(pax.errors.PaxError, "with_lengths(lengths)"):
        speculate(Rigid(), LM, ROWS, max_new_tokens=2)
    # For all else a cache may be any pytree.
    free = [greedy_alone(LM, row, 4) for row in ROWS]
    assert pax.generate(Rigid(), ROWS, max_new_tokens=4).tolist() == free
    assert beam_search(Rigid(), ROWS, max_new_tokens=4, beams=1).tokens[:, 0].tolist() == free
