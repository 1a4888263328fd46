"""Lengths in buckets: few programs, and the tokens of programs of the very size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import beam_search, prefill, samplers, speculate
from pax_export.nets import LayerKind
from tests.closeness import assert_close
from tests.generation.nets import TinyLM, prompts

SIZES = {"vocab_size": 23, "dim": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 24}
KINDS = {
    "learned positions": {"positions": "learned", "max_positions": 33},
    "windows": {"kinds": (LayerKind(window=5),)},
}


def decoder(kind):
    pax.seed_rng_key(0)
    lm = pax.nets.Decoder(pax.nets.DecoderConfig.llama(**SIZES | KINDS[kind]))
    return jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, lm)


@pytest.mark.parametrize(("kind", "dtype"), [("learned positions", None), ("windows", "int8")])
def test_the_tokens_are_those_of_programs_of_the_very_size(kind, dtype):
    lm = decoder(kind)

    def read(lm, tokens, lengths, cache):
        options = {"max_length": 33} if cache is None else {"cache": cache}
        return prefill(lm, tokens, lengths, cache_dtype=dtype, **options)

    def answer(lm, tokens, lengths, cache):
        options = {"stop": (3, 5), "pad": -1, "log_probs": True, "return_cache": True}
        return pax.generate(lm, tokens, lengths, cache=cache, max_new_tokens=7, **options)

    _, exact = read(lm, np.ones((3, 1), int), np.ones(3, int), None)
    padded = exact
    rounds = (7, [7, 2, 3]), (3, [2, 1, 2])  # the second reads a cache that the first has made
    for width, lengths in rounds if dtype is None else rounds[:1]:
        tokens = np.random.default_rng(width).integers(6, 23, (3, width))
        lengths = np.array(lengths)
        expected = jax.jit(read)(lm, tokens, lengths, exact)  # sizes as they are: traced
        made = read(lm, tokens, lengths, padded)
        assert_close(made[0], expected[0], rtol=1e-4, atol=1e-4)
        expected = jax.jit(answer)(lm, tokens, lengths, expected[1])
        made = answer(lm, tokens, lengths, made[1])
        assert np.array_equal(made.tokens, expected.tokens)
        assert made.lengths.tolist() == expected.lengths.tolist()
        assert_close(made.log_probs, expected.log_probs, rtol=1e-3, atol=1e-4)
        exact, padded = expected.cache, made.cache
        assert exact.lengths.tolist() == padded.lengths.tolist()


class Counted(TinyLM):
    """Counts how often it is traced, and refuses caches above its limit."""

    traces: list = []
    most = 10**9

    def init_cache(self, batch, max_length, dtype=None):
        if max_length > self.most:
            raise RuntimeError("no such position")
        return super().init_cache(batch, max_length, dtype)

    def __call__(self, *args, **kwargs):
        self.traces.append(1)
        return super().__call__(*args, **kwargs)


class Short(Counted):
    """A net that refuses caches of more than 12 places."""

    most = 12


def traced(run):
    before = len(Counted.traces)
    run()
    return len(Counted.traces) - before


TURNS = [(9, 3), (14, 5), (2, 8), (1, 1), (11, 6), (6, 2)]


@pytest.mark.parametrize("function", [pax.generate, pax.generate.stream])
def test_a_chat_compiles_a_handful_of_programs(function):
    lm, counts, cache = Counted(), [], None
    for number, (length, new) in enumerate(TURNS):
        sampler = (
            samplers.repetition_penalty(1.1 + number)
            | samplers.temperature(0.5 + number)
            | samplers.top_k(3 + number)
            | samplers.top_p(0.9 - number / 10)
            | samplers.min_p(0.01 + number / 100)
        )
        options = {"sampler": sampler, "key": jax.random.key(number), "max_new_tokens": new}
        options |= {"max_length": 100} if cache is None else {"cache": cache}

        def turn(length=length, options=options):
            nonlocal cache
            rows = prompts(length, seed=length)
            if function is pax.generate:
                cache = pax.generate(lm, rows, return_cache=True, **options).cache
            else:
                stream = function(lm, rows, **options)
                assert len(list(stream)) == options["max_new_tokens"]
                cache = stream.cache

        counts.append(traced(turn))
    # Prompts with a new cache and with one, those of one token, the rest, and the end of a turn.
    assert sum(counts) <= 5 and counts[4:] == [0, 0]
    assert cache.lengths.tolist() == [sum(a + b for a, b in TURNS)]


def test_beams_and_guesses_of_other_lengths_compile_nothing():
    lm, draft = Counted(), TinyLM(seed=1)
    for run in (beam_search, lambda lm, *args, **options: speculate(lm, draft, *args, **options)):
        run(lm, prompts(3, 7), max_new_tokens=4)
        assert traced(lambda: run(lm, prompts(9, 2), max_new_tokens=6)) == 0  # noqa: B023


def test_sampler_values_mean_the_same_as_operands():
    for sampler in (
        samplers.top_k(1),
        samplers.top_k(4) | samplers.temperature(3.0),
        samplers.top_k(100) | samplers.top_p(0.7),
        samplers.min_p(0.2) | samplers.temperature(2.0),
        samplers.repetition_penalty(5.0) | samplers.greedy(),
    ):
        settled, numbers = sampler._split()
        logits = jax.random.normal(jax.random.key(0), (2, 23))
        seen = jnp.zeros((2, 23), bool).at[:, 4].set(True)
        changed = jax.jit(lambda x: settled._joined(x).adjust(logits, seen))(numbers)  # noqa: B023
        assert_close(changed, sampler.adjust(logits, seen), rtol=1e-6)


def test_traced_fields_of_a_custom_sampler():
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class lifted(samplers.Sampler):
        traced = ("by",)
        token: int
        by: float

        def adjust(self, logits, seen):
            return logits.at[:, self.token].add(self.by)

    lm = Counted()

    def run(token, by):
        sampler = lifted(token, by) | samplers.greedy()
        return pax.generate(lm, [[1, 2]], max_new_tokens=2, sampler=sampler).tolist()

    assert run(4, 1e6) == [[4, 4]]
    assert traced(lambda: run(4, -1e6)) == 0
    assert 4 not in run(4, -1e6)[0]
    assert run(5, 1e6) == [[5, 5]]


def test_a_bucket_is_never_beyond_the_positions_of_a_net():
    lm = decoder("learned positions")
    made = pax.generate(lm, prompts(26), max_new_tokens=7, return_cache=True)
    assert made.tokens.shape == (1, 7)
    assert made.cache.max_length == 33
    # Padding behind the last position changes nothing.
    text = prompts(32)
    _, cache = prefill(lm, [text[0][:30]], max_length=33)
    logits, _ = prefill(lm, [text[0][30:]], cache=cache)
    assert_close(logits[0], lm(np.array(text))[0, -1], rtol=1e-4)
    small = Short()
    made = pax.generate(small, prompts(7), max_new_tokens=5, return_cache=True)
    assert made.cache.max_length == 12
    assert made.tokens.tolist() == pax.generate(TinyLM(), prompts(7), max_new_tokens=5).tolist()


def test_padding_of_the_longest_row_is_not_read():
    lm = Counted()
    row = prompts(5)[0]
    wide = np.zeros((1, 100), int)
    wide[0, :5] = row
    expected = pax.generate(lm, [row], max_new_tokens=3)
    assert traced(lambda: pax.generate(lm, wide, [5], max_new_tokens=3)) == 0
    assert pax.generate(lm, jnp.asarray(wide), jnp.array([5]), max_new_tokens=3).tolist() == (
        expected.tolist()
    )
