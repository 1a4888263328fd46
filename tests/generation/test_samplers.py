"""The samplers: what each rule keeps of logits, and how rules are put together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation.samplers import (
    Sampler,
    greedy,
    min_p,
    repetition_penalty,
    temperature,
    top_k,
    top_p,
)
from tests.closeness import assert_close
from tests.refusals import refused

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, 12)) * 2, jnp.float32)


def kept(sampler, logits=LOGITS):
    return np.isfinite(np.asarray(sampler.adjust(logits, None)))


def probabilities(logits=LOGITS):
    values = np.exp(np.asarray(logits, np.float64))
    return values / values.sum(-1, keepdims=True)


@pytest.mark.parametrize("count", [1, 4, 12, 40])
def test_top_k_keeps_the_likeliest(count):
    ranks = (-np.asarray(LOGITS)).argsort(-1).argsort(-1)
    assert np.array_equal(kept(top_k(count)), ranks < count)


@pytest.mark.parametrize("part", [1e-6, 0.3, 0.9, 1.0])
def test_top_p_keeps_the_fewest_that_reach_the_part(part):
    for row, keeps in zip(probabilities(), kept(top_p(part))):
        order = (-row).argsort()
        count = min(int((np.cumsum(row[order]) < part - 1e-7).sum()) + 1, 12)
        assert sorted(np.flatnonzero(keeps)) == sorted(order[:count])


@pytest.mark.parametrize("part", [0.01, 0.2, 1.0])
def test_min_p_keeps_tokens_near_the_likeliest(part):
    row = probabilities()
    assert np.array_equal(kept(min_p(part)), row >= part * row.max(-1, keepdims=True))


def test_of_equal_logits_one_is_always_kept():
    flat = jnp.zeros((2, 5))
    for sampler in (top_k(1), top_p(0.01), min_p(1.0)):
        assert kept(sampler, flat).any(-1).all()


def test_rules_work_in_their_order():
    seen = jnp.zeros((3, 12), bool).at[:, 0].set(True)
    chain = repetition_penalty(2.0) | temperature(0.5) | top_k(3)
    step = repetition_penalty(2.0).adjust(LOGITS, seen)
    assert_close(chain.adjust(LOGITS, seen), top_k(3).adjust(step / 0.5, None))
    assert chain.looks_back
    assert chain.draws
    assert not (temperature(0.5) | greedy()).draws


def test_draws_have_the_probabilities_of_kept_tokens():
    keys = jax.random.split(jax.random.key(0), 4000)
    logits = jnp.broadcast_to(LOGITS[0], (4000, 12))
    drawn = np.bincount((temperature(1.5) | top_k(4)).choose(logits, keys), minlength=12) / 4000
    expected = probabilities(jnp.where(kept(top_k(4))[:1], LOGITS[:1] / 1.5, -jnp.inf))[0]
    assert np.abs(drawn - expected).max() < 0.03


def test_equal_samplers_are_equal():
    one, other = temperature(1) | (top_k(5) | top_p(1)), (temperature(1.0) | top_k(5)) | top_p(1.0)
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == "temperature(1.0) | top_k(5) | top_p(1.0)"
    assert temperature(1.0) != top_p(1.0)
    assert greedy() == greedy()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: temperature(0), ["temperature", "greedy()"]),
        (lambda: temperature(-1.0), ["-1.0", "temperature(1.0)"]),
        (lambda: temperature(float("nan")), ["nan"]),
        (lambda: temperature(1e-38), ["1e-38", "1e-20 to 1e+20", "greedy()"]),
        (lambda: temperature(1e39), ["1e+39", "1e-20 to 1e+20", "temperature(1.0)"]),
        (lambda: repetition_penalty(1e-45), ["1e-45", "1e-20 to 1e+20"]),
        (lambda: top_k(2).choose(LOGITS), ["jax.random.split(key, 3)"]),
        (lambda: temperature("hot"), ["temperature(str)"]),
        (lambda: temperature(np.ones(3)), ["temperature"]),
        (lambda: top_k(0), ["top_k", "0"]),
        (lambda: top_k(2.0), ["top_k", "2.0"]),
        (lambda: top_k(True), ["top_k", "True"]),
        (lambda: top_p(0), ["top_p", "0"]),
        (lambda: top_p(90), ["90", "top_p(0.9)"]),
        (lambda: min_p(1.5), ["min_p", "1.5"]),
        (lambda: repetition_penalty(0), ["repetition_penalty", "0"]),
        (lambda: greedy() | top_k(3), ["top_k(3) | greedy()"]),
    ],
)
def test_invalid_samplers_are_refused(make, words):
    with refused(pax.errors.PaxError, *words):
        make()


def test_a_sampler_is_joined_with_samplers_only():
    with refused(TypeError, "unsupported operand"):
        temperature(1.0) | 0.5


# --- samplers of a user's own -----------------------------------------------------------------


class Counter(pax.Module):
    """Its favourite is the token after the last one."""

    def init_cache(self, batch, max_length, dtype=None):
        return jnp.zeros(batch, jnp.int32)

    def __call__(self, tokens, cache, lengths=None):
        return jax.nn.one_hot(tokens + 1, 10), cache


@dataclasses.dataclass(frozen=True)
class Wanting(Sampler):
    """Takes one token; its class says that two are equal whatever they want."""

    name: str
    tokens: list = dataclasses.field(compare=False)
    draws = False

    def adjust(self, logits, seen):
        return logits.at[:, self.tokens[0]].set(100.0)


def test_samplers_with_a_wrong_eq_are_told_apart():
    def first(sampler):
        return int(pax.generate(Counter(), [[1]], max_new_tokens=1, sampler=sampler)[0, 0])

    two, three = Wanting("a", [2]), Wanting("a", [3])
    assert two == three
    assert (first(two), first(three)) == (2, 3)
    two.tokens[0] = 7
    assert first(two) == 7


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"pad": 2**40}, "pad"),
        ({"tokens": [[1, [2]]]}, "tokens"),
    ],
)
def test_numbers_beyond_int32_are_refused(options, name):
    given = {"tokens": [[1]], "max_new_tokens": 1, **options}
    with refused(ValueError, name) as caught:
        pax.generate(Counter(), given.pop("tokens"), **given)
    assert isinstance(caught.value, pax.errors.PaxError)


def test_a_rule_derived_from_another_is_asked():
    """`generate` splits a rule into what is static and what is traced."""

    class without_the_best(top_k):
        def adjust(self, logits, seen):
            chosen = super().adjust(logits, seen)
            return jnp.where(logits == logits.max(-1, keepdims=True), -jnp.inf, chosen)

    rule = without_the_best(3)
    static, values = rule._split()
    joined = static._joined(values)
    assert np.array_equal(kept(joined), kept(rule))
    assert kept(joined).sum(-1).tolist() == [2, 2, 2]
