"""generate: tokens, log-probabilities and caches, for any net with a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import samplers
from pax_export.generation.samplers import greedy, temperature, top_k
from tests.closeness import assert_close
from tests.generation.nets import TinyLM, alone, logits_of, prompts
from tests.refusals import refused

LM = TinyLM()
ROWS = prompts(7, 3, 5, 1)


def test_each_row_gives_the_tokens_that_it_gives_alone():
    expected = [alone(LM, row, 8) for row in ROWS]
    together = pax.generate(LM, ROWS, max_new_tokens=8)
    assert (together.shape, together.dtype) == ((4, 8), jnp.int32)
    assert together.tolist() == expected
    assert len({tuple(row) for row in expected}) == 4  # the net is not one that says one thing
    for row, tokens in zip(ROWS[:2], expected):
        assert pax.generate(LM, [row], max_new_tokens=8).tolist() == [tokens]


def test_padding_has_no_influence():
    tokens, lengths = np.zeros((2, 6), np.int64), [3, 5]
    tokens[0, :3], tokens[1, :5] = ROWS[1], ROWS[2]
    other = tokens.copy()
    other[0, 3:], other[1, 5:] = -7, 10**6
    expected = pax.generate(LM, [ROWS[1], ROWS[2]], max_new_tokens=5).tolist()
    for given in (tokens, other, jnp.asarray(other)):
        assert pax.generate(LM, given, lengths, max_new_tokens=5).tolist() == expected


def test_rows_end_at_a_stop_and_are_padded():
    free = [alone(LM, row, 8) for row in ROWS]
    stop = (free[0][2], free[1][0])
    expected = [alone(LM, row, 8, stop, pad=-1) for row in ROWS]
    made = pax.generate(LM, ROWS, max_new_tokens=8, stop=stop, pad=-1, log_probs=True)
    assert made.tokens.tolist() == expected
    assert made.lengths.tolist() == [8 - row.count(-1) for row in expected]
    assert min(made.lengths) == 1
    assert made.log_probs[1, 1:].tolist() == [0.0] * 7
    assert made.cache is None
    # All have ended: the loop ends with them, and the rest is padding.
    ended = pax.generate(LM, [ROWS[1]], max_new_tokens=8, stop=free[1][0])
    assert ended.tolist() == [[free[1][0]] + [0] * 7]


def test_log_probabilities_are_those_of_the_net():
    sampler = temperature(0.3) | top_k(4)
    made = pax.generate(
        LM, ROWS, max_new_tokens=5, sampler=sampler, key=jax.random.key(3), log_probs=True
    )
    for row, tokens, found in zip(ROWS, made.tokens.tolist(), made.log_probs):
        logits = logits_of(LM, row + tokens)[len(row) - 1 : -1]
        expected = jax.nn.log_softmax(logits)[jnp.arange(5), jnp.array(tokens)]
        assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_a_prompt_is_read_in_chunks(chunk):
    expected = [alone(LM, row, 4) for row in ROWS]
    made = pax.generate(LM, ROWS, max_new_tokens=4, prefill_chunk=chunk)
    assert made.tolist() == expected


def test_a_cache_continues_with_the_next_turn():
    first = pax.generate(LM, ROWS, max_new_tokens=4, return_cache=True, max_length=30)
    before = jax.tree.map(np.array, first.cache)
    more = prompts(2, 4, 1, 3, seed=1)
    second = pax.generate(LM, more, max_new_tokens=4, cache=first.cache, prefill_chunk=2)
    texts = [a + b.tolist() + c for a, b, c in zip(ROWS, first.tokens, more)]
    assert second.tolist() == [alone(LM, text, 4) for text in texts]
    assert first.cache.lengths.tolist() == [len(row) + 4 for row in ROWS]
    for old, now in zip(jax.tree.leaves(before), jax.tree.leaves(first.cache)):
        assert np.array_equal(old, now)


def test_the_cache_of_an_ended_row_has_its_stop_and_no_padding():
    free = [alone(LM, row, 6) for row in ROWS]
    stop = free[0][1]
    made = pax.generate(LM, ROWS, max_new_tokens=6, stop=stop, return_cache=True, max_length=30)
    assert made.cache.lengths.tolist() == [
        len(row) + int(count) for row, count in zip(ROWS, made.lengths)
    ]
    assert made.lengths[0] == free[0].index(stop) + 1
    more = prompts(2, 1, 2, 1, seed=4)
    kept = [row[: int(n)].tolist() for row, n in zip(made.tokens, made.lengths)]
    texts = [a + b + c for a, b, c in zip(ROWS, kept, more)]
    after = pax.generate(LM, more, max_new_tokens=3, cache=made.cache)
    assert after.tolist() == [alone(LM, text, 3) for text in texts]


def test_it_is_compiled_once_for_a_shape_and_an_equal_sampler():
    traces = []

    class Counted(TinyLM):
        def __call__(self, *args, **kwargs):
            traces.append(1)
            return super().__call__(*args, **kwargs)

    lm = Counted()

    def run(sampler, seed):
        rows = prompts(4, 2, seed=seed)
        pax.generate(lm, rows, max_new_tokens=3, sampler=sampler, key=jax.random.key(seed))

    run(temperature(1) | top_k(np.int64(3)), 0)
    count = len(traces)
    run(temperature(1.0) | top_k(3), 1)
    run(temperature(np.float32(1)) | top_k(3), 2)
    assert len(traces) == count


def test_random_tokens_of_a_row_depend_on_its_own_key_alone():
    keys = jax.random.split(jax.random.key(1), 4)
    draw = {"max_new_tokens": 6, "sampler": temperature(2.0)}
    together = pax.generate(LM, ROWS, key=keys, **draw)
    for index in (0, 3):
        one = pax.generate(LM, [ROWS[index]], key=keys[index : index + 1], **draw)
        assert one[0].tolist() == together[index].tolist()
    # One key is as good as one for each row: rows with one prompt differ.
    same = pax.generate(LM, [ROWS[0]] * 4, key=jax.random.key(5), **draw)
    assert len({tuple(row) for row in same.tolist()}) == 4
    again = pax.generate(LM, [ROWS[0]] * 4, key=jax.random.PRNGKey(5), **draw)
    assert again.tolist() == same.tolist()


def test_a_stream_gives_what_generate_gives():
    free = [alone(LM, row, 6) for row in ROWS]
    for options in (
        {"stop": (free[0][2], free[1][0]), "pad": -1},
        {"sampler": temperature(1.5) | top_k(5), "key": jax.random.key(2), "prefill_chunk": 2},
    ):
        expected = np.asarray(pax.generate(LM, ROWS, max_new_tokens=6, **options))
        columns = list(pax.generate.stream(LM, ROWS, max_new_tokens=6, **options))
        assert np.array_equal(np.stack(columns, 1), expected[:, : len(columns)])
        assert (expected[:, len(columns) :] == options.get("pad", 0)).all()


def test_a_stream_ends_with_its_rows_and_keeps_its_cache():
    first = alone(LM, ROWS[0], 5)
    stream = pax.generate.stream(LM, [ROWS[0]], max_new_tokens=20, stop=first[2])
    assert stream.cache is None
    assert next(stream).tolist() == first[:1]
    early = stream.cache  # the stream goes on all the same, and writes elsewhere
    assert [int(x[0]) for x in stream] == first[1:3]
    assert early.lengths.tolist() == [len(ROWS[0]) + 1]
    assert stream.cache.lengths.tolist() == [len(ROWS[0]) + 3]
    more = pax.generate(LM, [[5, 6]], max_new_tokens=3, cache=stream.cache)
    assert more.tolist() == [alone(LM, [*ROWS[0], *first[:3], 5, 6], 3)]
    with pytest.raises(StopIteration):
        next(stream)


def test_repetition_is_penalised_over_prompt_and_new_tokens():
    sampler = samplers.repetition_penalty(1e6) | greedy()
    made = pax.generate(LM, ROWS, max_new_tokens=6, sampler=sampler)
    for row, tokens in zip(ROWS, made.tolist()):
        assert len(set(tokens)) == 6
        assert not set(row) & set(tokens)


def test_inside_of_jit():
    @jax.jit
    def reply(lm, tokens, lengths):
        return pax.generate(lm, tokens, lengths, max_new_tokens=4)

    tokens = np.array([ROWS[2], ROWS[1] + [0, 0]])
    expected = [alone(LM, ROWS[2], 4), alone(LM, ROWS[1], 4)]
    assert reply(LM, tokens, jnp.array([5, 3])).tolist() == expected


class Lossy(pax.Module):
    """Its favourite is the token after the last one; after 5 its logits are NaN."""

    def init_cache(self, batch, max_length, dtype=None):
        return jnp.zeros(batch, jnp.int32)

    def __call__(self, tokens, cache, lengths=None):
        logits = jax.nn.one_hot(tokens + 1, 10)
        return jnp.where(tokens[..., None] == 5, jnp.nan, logits), cache


@pytest.mark.parametrize("sampler", [greedy(), temperature(0.01)])
def test_where_logits_are_nan_a_row_has_no_token_and_ends(sampler):
    rows = [[3], [0], [5]]
    options = {"max_new_tokens": 4, "sampler": sampler, "key": jax.random.key(0)}
    made = pax.generate(Lossy(), rows, log_probs=True, **options)
    assert made.tokens.tolist() == [[4, 5, -1, 0], [1, 2, 3, 4], [-1, 0, 0, 0]]
    assert made.lengths.tolist() == [2, 4, 0]
    assert np.isfinite(made.log_probs).all()
    columns = list(pax.generate.stream(Lossy(), rows, **options))
    assert np.stack(columns, 1).tolist() == made.tokens.tolist()


def test_invalid_lengths_give_no_token_under_jit():
    tokens = np.array([ROWS[2]] * 4)
    reply = jax.jit(lambda lengths: pax.generate(LM, tokens, lengths, max_new_tokens=3, pad=7))
    expected = alone(LM, ROWS[2], 3)
    assert reply(np.array([0, 5, 6, -2])).tolist() == [[-1, 7, 7], expected, [-1, 7, 7], [-1, 7, 7]]


def test_a_net_in_train_mode_generates_in_eval_mode():
    assert LM.training
    assert pax.generate(LM.train(), [ROWS[0]], max_new_tokens=2).tolist() == [alone(LM, ROWS[0], 2)]


def generate_four(*args, lm=LM, **options):
    return pax.generate(lm, *args, **{"max_new_tokens": 4, **options})


@pytest.mark.parametrize(
    "args, options, words",
    [
        (([[]],), {}, ["row 0"]),
        (([[1], []],), {}, ["row 1", "0 tokens"]),
        (([[1, 2]], [0]), {}, ["row 0"]),
        (([[1, 2]], [3]), {}, ["lengths[0]", "from 1 to 2"]),
        (([[1, 2]], [-1]), {}, ["lengths[0]"]),
        (([[1, 2]], [1, 2]), {}, ["1 lengths"]),
        (([[1, 2]], [1.0]), {}, ["lengths", "float64"]),
        (([1, 2],), {}, ["[batch, length]", "tokens[None]"]),
        ((np.ones((2, 3)),), {}, ["tokens"]),
        ((["a text"],), {}, ["tokenizer.encode(text)"]),
        (([[2**40]],), {}, ["int32"]),
        (([[1, -2]],), {}, ["tokens[0, 1]", "-2"]),
        (([[1]],), {"stop": [3, 99]}, ["stop", "99", "0 to 22"]),
        (([[1]],), {"pad": 23}, ["pad", "23", "0 to 22"]),
        (([[1]],), {"stop": "</s>"}, ["tokenizer=..."]),
        (([[1]],), {"stop": [[3, 2.5]]}, ["[3, 2.5]"]),
        (([[1]],), {"stop": [[]]}, ["[]"]),
        (([[1]],), {"stop": [[3, 99]]}, ["stop", "99", "0 to 22"]),
        (([[1]],), {"stop": [2.5]}, ["2.5"]),
        (([[1]],), {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        (([[1]],), {"max_new_tokens": 2.0}, ["max_new_tokens", "2.0"]),
        (([[1]],), {"prefill_chunk": 0}, ["prefill_chunk", "0"]),
        (([],), {}, ["shape (0,)"]),
        (([[1]],), {"sampler": greedy}, ["greedy()"]),
        (([[1]],), {"sampler": "top_p"}, ["temperature(0.8) | top_p(0.9)"]),
        (([[1]],), {"sampler": top_k(2)}, ["key=jax.random.key(0)"]),
        (([[1]],), {"cache_dtype": "nope"}, ["generate: cache_dtype", "'nope'"]),
        (([[1]],), {"cache_dtype": int}, ["generate: cache_dtype", "<class 'int'>"]),
        (([[1, 2, 3]],), {"max_length": 6}, ["max_length=7", "row 0"]),
        (([[1]],), {"lm": pax.Linear(2, 3)}, ["init_cache(batch, max_length, dtype=None)"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(args, options, words):
    with refused(pax.errors.PaxError, *words):
        generate_four(*args, **options)


@pytest.mark.parametrize("key", ["a", 3, jax.random.split(jax.random.key(0), 3)])
def test_jax_refuses_other_keys(key):
    with pytest.raises((TypeError, ValueError), match="key|JAX array type"):
        generate_four(ROWS, sampler=top_k(2), key=key)


def test_a_cache_without_room_is_named_and_stays_as_it_was():
    made = pax.generate(LM, ROWS, max_new_tokens=4, max_length=11, return_cache=True)
    before = jax.tree.map(np.array, made.cache)
    for rows, options, names in (
        ([[1, 2], [1], [1], [1]], {}, ["row 0", "11 tokens", "max_length=17"]),
        ([[1]], {}, ["rows"]),
        (ROWS, {"max_length": 50}, ["max_length=11"]),
    ):
        with refused(pax.errors.PaxError, *names):
            generate_four(rows, **{"cache": made.cache, **options})
    for old, now in zip(jax.tree.leaves(before), jax.tree.leaves(made.cache)):
        assert np.array_equal(old, now)


def test_a_new_cache_of_prefill_requires_its_length():
    with refused(pax.errors.InvalidArgumentError, where="prefill: max_length"):
        pax.generation.prefill(LM, [[1, 2]])
