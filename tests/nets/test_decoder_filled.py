"""Attention to the filled part of a cache: the same logits, and nothing behind it is looked at."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig, LayerKind
from pax_export.nets.decoder._layer import parts_of
from tests.closeness import assert_close

ROOM = 512  # attention is compiled to 128, 256 and all of them
LLAMA = DecoderConfig.llama(
    vocab_size=30, dim=8, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=8
)
TEXT = np.random.RandomState(0).randint(0, 30, (2, ROOM))


@jax.jit
def read(lm, cache, tokens, counts):
    return lm(tokens, counts, cache=cache, last_only=True)


def filled_to(lm, *lengths, **options):
    """A cache that holds the beginning of each row of the text."""
    cache = lm.init_cache(len(lengths), ROOM, **options)
    return read(lm, cache, TEXT[: len(lengths)], np.array(lengths))


def next_of(lm, cache, counts=(1, 1)):
    """Logits after one token more in each row, and the cache."""
    rows = np.arange(cache.batch)
    tokens = TEXT[rows, np.asarray(cache.lengths)]
    return read(lm, cache, tokens[:, None], np.array(counts[: cache.batch]))


def spoiled_behind(cache, place):
    """What an attention would give that looks at these places: NaN."""
    spoil = lambda store: store.at[..., place:, :, :].set(jnp.nan)  # noqa: E731
    return dataclasses.replace(cache, keys=spoil(cache.keys), values=spoil(cache.values))


@pytest.mark.parametrize(
    ("room", "parts"), [(8, ()), (255, ()), (256, (128,)), (600, (150, 300)), (2048, (512, 1024))]
)
def test_a_quarter_and_a_half_are_parts_where_they_are_large_enough(room, parts):
    assert parts_of(room) == parts


@pytest.mark.parametrize(
    ("change", "form", "options"),
    [
        ({}, "scanned", {"listed": True}),
        ({"positions": "alibi", "attention_softcap": 20.0}, "scanned", {}),
        ({"kinds": (LayerKind(window=150), LayerKind())}, "listed", {"rolling": False}),
    ],
    ids=["cache of each layer", "alibi, soft cap", "window in order"],
)
def test_logits_are_those_without_a_cache_at_every_length(change, form, options):
    lm = Decoder(dataclasses.replace(LLAMA, **change), layers=form)
    expected = np.asarray(jax.jit(lambda lm: lm(TEXT))(lm))
    for short, long in ((3, 127), (128, 129), (5, 255), (256, 257), (1, ROOM - 1)):
        logits, cache = filled_to(lm, short, long, **options)
        assert_close(logits, expected[[0, 1], [short - 1, long - 1]], rtol=2e-5)
        logits, cache = next_of(lm, cache)
        assert_close(logits, expected[[0, 1], [short, long]], rtol=2e-5)
        assert cache.lengths.tolist() == [short + 1, long + 1]


def test_a_cache_of_int8_gives_what_its_first_places_give():
    lm = Decoder(LLAMA)
    short = jax.jit(lambda lm: lm(TEXT[:, :90], cache=lm.init_cache(2, 100, "int8")))(lm)[0][:, -1]
    assert_close(filled_to(lm, 90, 90, dtype="int8")[0], short, rtol=2e-5)


@pytest.mark.parametrize("listed", [False, True])
def test_places_behind_the_part_are_not_read(listed):
    lm = Decoder(LLAMA).listed() if listed else Decoder(LLAMA)
    for length, part in ((100, 128), (127, 128), (128, 256), (255, 256)):
        _, cache = filled_to(lm, 3, length)
        logits, _ = next_of(lm, spoiled_behind(cache, part))
        assert np.isfinite(logits).all(), (length, part)
    _, cache = filled_to(lm, 3, 256)  # with the next one they are 257, which asks for all
    assert np.isnan(next_of(lm, spoiled_behind(cache, 257))[0]).all()


def test_a_row_that_is_given_nothing_asks_for_no_more():
    lm = Decoder(LLAMA)
    _, cache = filled_to(lm, 9, 300)
    logits, after = next_of(lm, spoiled_behind(cache, 400), (1, 0))
    assert np.isfinite(logits[0]).all() and after.lengths.tolist() == [10, 300]


def test_a_token_for_which_there_is_no_room_has_no_logits():
    lm = Decoder(LLAMA)
    full = filled_to(lm, ROOM)[1]
    logits, after = read(lm, full, TEXT[:1, :1], np.array([1]))
    assert np.isnan(logits).all() and after.overflowed.all()


def test_under_vmap_each_row_has_a_length_of_its_own():
    lm = Decoder(LLAMA)
    _, cache = filled_to(lm, 3, 300)
    expected, _ = next_of(lm, cache)

    def one(keys, values, length, token):
        row = dataclasses.replace(cache, keys=keys, values=values, lengths=length[None])
        return lm(token[None, None], cache=row, last_only=True)[0][0]

    tokens = TEXT[[0, 1], [3, 300]]
    stores = [store[:, :, None] for store in (cache.keys, cache.values)]
    rows = jax.jit(jax.vmap(one, (1, 1, 0, 0)))(*stores, cache.lengths, tokens)
    assert_close(rows, expected, rtol=2e-5)


def test_only_programs_for_a_cpu_choose():
    lm, cache = jax.eval_shape(lambda: (Decoder(LLAMA), Decoder(LLAMA).init_cache(1, ROOM)))
    token = jax.ShapeDtypeStruct((1, 1), "int32")
    step = jax.jit(lambda lm, cache, token: lm(token, cache=cache)[0])

    def sees_a_quarter(*platforms):
        made = jax.export.export(step, platforms=platforms)(lm, cache, token)
        return f"tensor<1x{ROOM // 4}x2x2xf32>" in made.mlir_module()

    assert sees_a_quarter("cpu") and sees_a_quarter("cpu", "tpu")
    assert not sees_a_quarter("tpu") and not sees_a_quarter("cuda")


@pytest.mark.parametrize(
    "options",
    [
        {"format": "stablehlo", "validate": False},
        {"platforms": ["cpu"], "validate": False},
        {"format": "onnx"},
    ],
    ids=str,
)
def test_an_export_gives_the_same_at_every_length(options, tmp_path):
    lm = Decoder(dataclasses.replace(LLAMA, num_layers=1))
    pax.generation.export(
        lm, tmp_path / "lm", max_length=ROOM, signatures=["prefill"], layers="scanned", **options
    )
    served = pax.export.load(tmp_path / "lm")
    for lengths in ((3, 100), (4, 200), (1, 400)):
        cache = filled_to(lm, *lengths)[1]
        expected, _ = next_of(lm, cache)
        token = TEXT[[0, 1], np.array(lengths)].astype(np.int32)[:, None]
        assert_close(served(token, np.ones(2, np.int32), cache)["logits"], expected, rtol=2e-5)
